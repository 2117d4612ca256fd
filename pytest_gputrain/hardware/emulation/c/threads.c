// Prevents threads from ending the program with an abort while Python ends.
//
// On an emulated GPU a backward pass takes no time, so a program can end while autograd's thread still frees Python objects.
// Python before 3.14 ends such a thread by pthread_exit. Its unwinding then meets a C++ function that may not be unwound:
// "terminate called without an active exception". Here, as in Python 3.14, the thread waits until the process ends.
#include "emulated.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*finalizing)(void);
typedef void (*leave)(void *) __attribute__((noreturn));

static int python_ends(void) {
  finalizing ends = (finalizing)dlsym(RTLD_DEFAULT, "Py_IsFinalizing"); // since Python 3.13
  if (!ends)
    ends = (finalizing)dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  return ends && ends();
}

__attribute__((noreturn)) void pthread_exit(void *value) {
  while (python_ends())
    pause();
  leave leave_thread = (leave)dlsym(RTLD_NEXT, "pthread_exit");
  if (!leave_thread)
    abort();
  leave_thread(value);
}
