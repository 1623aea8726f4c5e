#include "choose.h"
#include "norm.h"
