// Stands in for cuSOLVER. Factorizations compute nothing. This file has the functions that stubs.py does not write.
#include "emulated.h"

enum { CUSOLVER_INVALID_VALUE = 3 };
GPUTRAIN_DESTROYS(cusolverDnDestroy, CUSOLVER_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusolverDnDestroyGesvdjInfo, CUSOLVER_INVALID_VALUE)
GPUTRAIN_DESTROYS(cusolverDnDestroyParams, CUSOLVER_INVALID_VALUE)
