// The vectors of any CPU: 16 bytes, which the compiler maps to what its baseline has.
//
// Included inside the namespace of an instruction set.

#include "cpu/flash_attn_vector-inl.h"

struct Floats : Vector<float, 16> {
  static constexpr int kColumns = 2;
  static constexpr int rows(int columns) { return columns == 2 ? 6 : 12; }
};

struct Doubles : Vector<double, 16> {
  static constexpr int kColumns = 2;
  static constexpr int rows(int columns) { return columns == 2 ? 6 : 12; }
};
