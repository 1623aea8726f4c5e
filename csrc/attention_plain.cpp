#include "attention_tile.h"
