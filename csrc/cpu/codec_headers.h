// What the codecs' bodies include, before any instruction set is chosen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/onebit_adam_update.h"
#include "cpu/onebit_compress.h"
#include "cpu/onebit_compress_momentum.h"
#include "cpu/onebit_reduce.h"
#include "cpu/scaled_codec.h"
