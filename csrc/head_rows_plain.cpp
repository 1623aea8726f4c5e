#include "head_rows_kernel.h"
