// Panels: the right side B of a product C = A B, in the order in which the product reads it.
//
// A panel has 16 columns. In a column, `Pack` consecutive elements are a word of 32 bits, as the dot-product
// instructions of every x86 generation need them, and words are transposed: word k of all columns, then word k + 1. So
// a panel is read as one stream, a cache line at a time. In bfloat16 (Pack 2), for element i of column j, bi,j:
//
//               column 0      column 1            column 15
//     line 0  [ b0,0  b1,0  | b0,1  b1,1  | ... | b0,15  b1,15 ]   64 bytes
//     line 1  [ b2,0  b3,0  | b2,1  b3,1  | ... | b2,15  b3,15 ]
//     ...                                                          depth / Pack lines, then the next panel
//
// As an array a panel is [depth / Pack][16][Pack]. In float32 (Pack 1) a line has one element of each column. Columns
// are padded with zeros to a multiple of 16, and the depth to one of 64.
#pragma once

#include "../model.h"
#include "../vector/numbers.h"

template <class T> constexpr int Pack = 4 / sizeof(T);

// Reads `count` weights of a column.
template <class T> void read_column(const Matrix& matrix, int64_t column, int64_t count, float* to, const T*) {
    const T* from = static_cast<const T*>(matrix.panels) + column / LANES * LANES * matrix.depth +
                    column % LANES * Pack<T>;
    for (int64_t k = 0; k < count; k++) to[k] = to_float(from[k / Pack<T> * LANES * Pack<T> + k % Pack<T>]);
}
