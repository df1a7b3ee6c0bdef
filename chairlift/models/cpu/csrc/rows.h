// Rows of activations, in the number format that the next product multiplies, and the memory they lie in.
#pragma once

#include "vector.h"

constexpr int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// Cuts one piece of memory into arrays that start at a cache line.
struct Arena {
    char* base;
    int64_t used = 0;

    template <class T> T* take(int64_t count) {
        T* start = reinterpret_cast<T*>(base + used);
        used += pad(count * int64_t(sizeof(T)), 64);
        return start;
    }
};

// What a product multiplies: the number format of the weights W decides.
template <class W> struct Rows {
    W* values;
    float* scales;  // one per row, int8 only
    int64_t stride;

    Rows(Arena& arena, int64_t count, int64_t width) : scales(nullptr), stride(pad(width, 64)) {
        values = arena.take<W>(count * stride);
        if (sizeof(W) == 1) scales = arena.take<float>(count);
    }

    // What lies between the width and the stride meets weights of zero, but must be a number.
    void clear_padding(int64_t row, int64_t width) const {
        std::memset((void*)(values + row * stride + width), 0, (stride - width) * sizeof(W));
    }
};

template <class W> INLINE void store_row(const Rows<W>& rows, int64_t row, int64_t k, f32x16 x, float) {
    store16(rows.values + row * rows.stride + k, x);
}

INLINE void store_row(const Rows<int8_t>& rows, int64_t row, int64_t k, f32x16 x, float inverse_scale) {
    i32x16 whole = __builtin_convertvector((x * inverse_scale + 12582912.0f) - 12582912.0f, i32x16);
    store_raw(rows.values + row * rows.stride + k, __builtin_convertvector(whole, i8x16));
}

// Symmetric, one scale per row: the largest magnitude becomes 127.
template <class W> INLINE float choose_scale(const Rows<W>& rows, int64_t row, float largest) {
    if (sizeof(W) != 1) return 1;
    rows.scales[row] = largest / 127;
    return largest > 0 ? 127 / largest : 0;
}

// 1 / sqrt(mean(x^2) + eps); behind the width, up to a multiple of 16, x is 0.
INLINE float inverse_rms(const float* x, int64_t width, float eps) {
    f32x16 squares{};
    for (int64_t k = 0; k < width; k += LANES) squares += load16(x + k) * load16(x + k);
    return 1 / __builtin_sqrtf(sum16(squares) / width + eps);
}

// x / sqrt(mean(x^2) + eps) * weight -> a row of the next product.
template <class W>
void normalize(const float* x, const float* weight, int64_t width, float eps, const Rows<W>& rows, int64_t row) {
    const int64_t padded = pad(width, LANES);
    const float scale = inverse_rms(x, width, eps);
    f32x16 largest{};
    if (sizeof(W) == 1)
        for (int64_t k = 0; k < padded; k += LANES)
            largest = max16(abs16(load16(x + k) * load16(weight + k)), largest);
    const float inverse = choose_scale(rows, row, max_of16(largest) * scale);
    for (int64_t k = 0; k < padded; k += LANES)
        store_row(rows, row, k, load16(x + k) * scale * load16(weight + k), inverse);
    rows.clear_padding(row, padded);
}

// Rows of the model's format as rows of the next product; `padded` elements of each are numbers.
template <class T, class W> void convert_row(const T* from, int64_t padded, const Rows<W>& rows, int64_t row) {
    f32x16 largest{}, doubts{};
    if (sizeof(W) == 1)
        for (int64_t k = 0; k < padded; k += LANES) {
            largest = max16(abs16(load16(from + k)), largest);
            doubts += load16(from + k) * 0.0f;  // not 0 if there is something that is no number, which no maximum shows
        }
    const float inverse = choose_scale(rows, row, max_of16(largest) + sum16(doubts));
    for (int64_t k = 0; k < padded; k += LANES) store_row(rows, row, k, load16(from + k), inverse);
    rows.clear_padding(row, padded);
}
