#if defined(__x86_64__)
#include "attention_tile.h"
#endif
