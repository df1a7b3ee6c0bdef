// Rows of activations, in the number format that the next product multiplies.
#pragma once

#include "grouped/product.h"
#include "memory.h"
#include "product/product.h"

#if defined(__AMX_BF16__)
#include "grouped/unpacked.h"
#endif

constexpr int ROWS_AT_ONCE = 32;
constexpr int MOST_HEAD_DIM = 512;  // columns that are multiplied at once, at most

// The numbers that a model in bfloat16 multiplies by weights in groups. Panels that a thread has unpacked for that are
// forgotten when it leaves.
#if defined(__AMX_BF16__)
typedef bf16 FactorOfGroups;
INLINE void forget_panels() { unpacked_panels.forget(); }
#else
typedef Group FactorOfGroups;
INLINE void forget_panels() {}
#endif

// Adds the products with the rounding errors of weights, `width` columns of each row, to those with the weights.
INLINE void add_residuals(const float* more, int rows, int width, float* c, int64_t ldc) {
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < width; k += LANES)
            store16(c + r * ldc + k, load16(c + r * ldc + k) + load16(more + r * width + k));
}

// Calls `use(part, panel, panels, c)` with each format's share of some neighbouring panels, and where they begin in C.
template <class Use> INLINE void each_format(const Matrix& matrix, int64_t panel, int panels, float* c, Use use) {
    const Matrix* part = &matrix;
    for (; part->next && panel + panels > part->first_next; part = part->next) {
        const int own = panel < part->first_next ? int(part->first_next - panel) : 0;
        if (own) use(*part, panel, own, c);
        panel += own - part->first_next, panels -= own, c += own * LANES;
    }
    use(*part, panel, panels, c);
}

// The rows that a product multiplies, in the number format for weights W. `stride`: elements of a row, with padding.
template <class W> struct Rows {
    static constexpr bool IS_QUANTIZED = false;
    static constexpr int64_t ELEMENT_BYTES = sizeof(W);
    static constexpr int64_t PREFETCHED_BYTES = sizeof(W);  // of each weight of the next unit, while one is multiplied
    W* values;
    int64_t stride;

    Rows(Arena& arena, int64_t count, int64_t width)
        : values(arena.allocate<W>(count * pad(width, 64))), stride(pad(width, 64)) {}

    void put(int64_t row, int64_t k, f32x16 first, f32x16 second, float) const {
        store32(values + row * stride + k, first, second);
    }

    // Elements between the width and the stride are multiplied by weights of zero, but must be finite.
    void clear_padding(int64_t row, int64_t width) const {
        std::memset((void*)(values + row * stride + width), 0, (stride - width) * sizeof(W));
    }

    // The rows from that one on, as a block by themselves.
    Rows block(int64_t first, int64_t) const {
        Rows own = *this;
        own.values += first * stride;
        return own;
    }

    // That row of these, as the first of a block.
    Rows at(int64_t row) const { return block(row, 1); }

    void copy(int64_t row, const Rows& from, int64_t of) const {
        std::memcpy((void*)(values + row * stride), (const void*)(from.values + of * stride), stride * sizeof(W));
    }

    // Columns of some panels, for `count` rows.
    void multiply_by(const Matrix& matrix, int64_t row, int count, int64_t panel, int panels, float* c, int64_t ldc,
                     Prefetch prefetch) const {
#if defined(__AMX_BF16__)
        if constexpr (std::is_same_v<W, bf16>)
            if (matrix.num_bits <= 8)
                return each_format(matrix, panel, panels, c, [&](const Matrix& part, int64_t first, int size, float* to) {
                    multiply_groups_by(part, row, count, first, size, to, ldc, prefetch.lines_per_step > 0);
                });
#endif
        const W* weights = static_cast<const W*>(matrix.panels) + panel * LANES * matrix.depth;
        multiply(values + row * stride, stride, count, weights, panels, matrix.depth, c, ldc, prefetch);
    }

#if defined(__AMX_BF16__)
  private:
    // `is_more`: other rows follow.
    void multiply_groups_by(const Matrix& matrix, int64_t row, int count, int64_t panel, int panels, float* c,
                            int64_t ldc, bool is_more) const {
        const W* own = values + row * stride;
        multiply_unpacked(own, stride, count, matrix, panel, panels, c, ldc, is_more);
        const int64_t first = matrix.first_residual / LANES;
        if (!matrix.residual_panels || panel < first) return;
        const int width = panels * LANES;
        alignas(64) float more[ROWS_AT_ONCE * MOST_HEAD_DIM];
        multiply_unpacked(own, stride, count, matrix.residual(), panel - first, panels, more, width, false);
        add_residuals(more, count, width, c, ldc);
    }
#endif
};

// Quantized rows: in blocks of rows that are multiplied at once, each block stored depth first.
template <> struct Rows<Group> {
    static constexpr bool IS_QUANTIZED = true;
    static constexpr int64_t ELEMENT_BYTES = 2;  // sizeof(Group) / GROUP, and some rounding errors
    static constexpr int64_t PREFETCHED_BYTES = 0;  // the product itself prefetches the next panels
    Group *groups, *residuals;  // [count / block_rows][stride / GROUP][block_rows]
    uint8_t* has_residual;      // likewise
    int64_t block_rows, stride;

    Rows(Arena& arena, int64_t count, int64_t width)
        : block_rows(count < ROWS_AT_ONCE ? count : ROWS_AT_ONCE), stride(pad(width, 64)) {
        const int64_t num_groups = pad(count, block_rows ? block_rows : 1) * stride / GROUP;
        groups = arena.allocate<Group>(num_groups);
        residuals = arena.allocate<Group>(num_groups);
        has_residual = arena.allocate<uint8_t>(num_groups + ROWS_AT_ONCE);
    }

    int64_t place_of(int64_t row, int64_t k) const {
        return (row / block_rows * (stride / GROUP) + k / GROUP) * block_rows + row % block_rows;
    }

    // The rounding errors of a group with a magnitude above the limit are stored as well.
    void put(int64_t row, int64_t k, f32x16 first, f32x16 second, float limit) const {
        const int64_t place = place_of(row, k);
        has_residual[place] = !(quantize(first, second, groups[place]) <= limit);
        if (has_residual[place]) quantize(first, second, residuals[place]);
    }

    void clear_padding(int64_t row, int64_t width) const {
        for (int64_t k = width; k < stride; k += GROUP) {
            groups[place_of(row, k)] = {};
            has_residual[place_of(row, k)] = 0;
        }
    }

    // The memory of `count` rows from that one on, up to ROWS_AT_ONCE, as a block by themselves.
    Rows block(int64_t first, int64_t count) const { return moved(first * (stride / GROUP), count); }

    // That row of these, as the first of a block.
    Rows at(int64_t row) const { return moved(place_of(row, 0), block_rows); }

    void copy(int64_t row, const Rows& from, int64_t of) const {
        for (int64_t k = 0; k < stride; k += GROUP) {
            const int64_t place = place_of(row, k), other = from.place_of(of, k);
            groups[place] = from.groups[other];
            has_residual[place] = from.has_residual[other];
            if (has_residual[place]) residuals[place] = from.residuals[other];
        }
    }

    // `row` begins a block.
    void multiply_by(const Matrix& matrix, int64_t row, int rows, int64_t panel, int panels, float* c, int64_t ldc,
                     Prefetch prefetch) const {
        each_format(matrix, panel, panels, c, [&](const Matrix& part, int64_t first, int size, float* to) {
            const int64_t ahead = size == panels ? prefetch.panels_ahead : 0;
            multiply_groups_by(part, row, rows, first, size, to, ldc, ahead);
        });
    }

  private:
    void multiply_groups_by(const Matrix& matrix, int64_t row, int rows, int64_t panel, int panels, float* c,
                            int64_t ldc, int64_t panels_ahead) const {
        const int64_t place = place_of(row, 0), first = matrix.first_residual / LANES;
        const GroupedRows a{groups + place, residuals + place, has_residual + place, block_rows};
        multiply(a, rows, matrix, panel, panels, c, ldc, panels_ahead);
        if (!matrix.residual_panels || panel < first) return;
        const int width = panels * LANES;
        alignas(64) float more[ROWS_AT_ONCE * MOST_HEAD_DIM];
        multiply(a, rows, matrix.residual(), panel - first, panels, more, width);
        add_residuals(more, rows, width, c, ldc);
    }

    Rows moved(int64_t place, int64_t rows) const {
        Rows own = *this;
        own.groups += place, own.residuals += place, own.has_residual += place, own.block_rows = rows;
        return own;
    }
};

// Row `row`: x(k) is elements k to k + 15 for a k below `width`; the rest is zeros.
template <class W, class X> INLINE void put_row(const Rows<W>& rows, int64_t row, int64_t width, X x) {
    float limit = 0;
    if (Rows<W>::IS_QUANTIZED) {
        f32x16 squares{};
        for (int64_t k = 0; k < width; k += LANES) squares += x(k) * x(k);
        limit = DWARFING * __builtin_sqrtf(sum16(squares) / pad(width, LANES));
    }
    int64_t k = 0;
    for (; k < width; k += 2 * LANES) rows.put(row, k, x(k), k + LANES < width ? x(k + LANES) : f32x16{}, limit);
    rows.clear_padding(row, k);
}

// 1 / sqrt(mean(x^2) + eps); after the width, up to a multiple of 16, x is 0.
INLINE float inverse_rms(const float* x, int64_t width, float eps) {
    f32x16 squares{};
    for (int64_t k = 0; k < width; k += LANES) squares += load16(x + k) * load16(x + k);
    return 1 / __builtin_sqrtf(sum16(squares) / width + eps);
}

// x / sqrt(mean(x^2) + eps) * weight -> a row of the next product.
template <class W>
void normalize(const float* x, const float* weight, int64_t width, float eps, const Rows<W>& rows, int64_t row) {
    const float scale = inverse_rms(x, width, eps);
    put_row(rows, row, width, [&](int64_t k) { return load16(x + k) * scale * load16(weight + k); });
}

// Rows of the model's format as rows of the next product; up to a multiple of 16, elements after the width are 0.
template <class T, class W> void convert_row(const T* from, int64_t width, const Rows<W>& rows, int64_t row) {
    put_row(rows, row, width, [&](int64_t k) { return load16(from + k); });
}
