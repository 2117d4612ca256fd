// Stands in for cuSPARSE. Products of sparse matrices compute nothing. This file has the functions that stubs.py does not
// write.
#include "emulated.h"

// Indexed by cusparseStatus_t.
static const struct {
  const char *name, *text;
} statuses[] = {
    {"CUSPARSE_STATUS_SUCCESS", "success"},
    {"CUSPARSE_STATUS_NOT_INITIALIZED", "initialization error"},
    {"CUSPARSE_STATUS_ALLOC_FAILED", "resource allocation failed"},
    {"CUSPARSE_STATUS_INVALID_VALUE", "invalid value"},
    {"CUSPARSE_STATUS_ARCH_MISMATCH", "architecture mismatch"},
    {"CUSPARSE_STATUS_MAPPING_ERROR", "texture/surface mapping failed"},
    {"CUSPARSE_STATUS_EXECUTION_FAILED", "kernel launch failure"},
    {"CUSPARSE_STATUS_INTERNAL_ERROR", "internal error"},
    {"CUSPARSE_STATUS_MATRIX_TYPE_NOT_SUPPORTED", "matrix type not supported"},
    {"CUSPARSE_STATUS_ZERO_PIVOT", "zero pivot"},
    {"CUSPARSE_STATUS_NOT_SUPPORTED", "an emulated GPU does not support this operation"},
    {"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", "insufficient resources"},
};
enum { STATUSES = sizeof statuses / sizeof *statuses, CUSPARSE_INVALID_VALUE = 3 };

const char *cusparseGetErrorName(unsigned status) {
  return status < STATUSES ? statuses[status].name : "unrecognized error code";
}
const char *cusparseGetErrorString(unsigned status) {
  return status < STATUSES ? statuses[status].text : "unrecognized error code";
}

GPUTRAIN_DESTROYS(cusparseDestroy, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseDestroyBsrsm2Info, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseDestroyBsrsv2Info, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseDestroyDnMat, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseDestroyDnVec, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseDestroyMatDescr, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseDestroySpMat, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseSpGEMM_destroyDescr, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseSpSM_destroyDescr, CUSPARSE_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusparseSpSV_destroyDescr, CUSPARSE_INVALID_VALUE)
