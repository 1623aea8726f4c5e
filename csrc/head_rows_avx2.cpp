#if defined(__x86_64__)
#include "head_rows_kernel.h"
#endif
