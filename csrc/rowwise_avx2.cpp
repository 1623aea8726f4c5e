#if defined(__x86_64__)
#include "choose.h"
#include "norm.h"
#endif
