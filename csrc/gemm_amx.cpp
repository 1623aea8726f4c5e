#if defined(__x86_64__)
#include "gemm.h"
#endif
