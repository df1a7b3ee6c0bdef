// The residual stream of a pass: what blocks read of it, and what they add to it.
//
// The stream is float32. Products multiply the model's number format T, or 8-bit integers in groups if W is Group and
// the matrix is not plain (plain ones are of the format T), but bfloat16 where AMX multiplies groups. All threads of a Team run every function that takes one.
#pragma once

#include "linear.h"

struct Token {
    int32_t position, slot;
};

// Whether a matrix is not quantized although others are.
template <class W> bool is_plain(const Matrix& matrix) { return Rows<W>::IS_QUANTIZED && matrix.num_bits > 8; }

// Rows between two products of a block: written in the model's format, and quantized, if the next matrix needs it.
template <class T, class W> struct InnerRows {
    Rows<W> multiplied;
    Rows<T> written;  // the same memory, unless W is Group

    InnerRows(Arena& arena, int64_t count, int64_t width)
        : multiplied(arena, count, width), written(before(multiplied, arena, count)) {}

    // The same memory with rows of another width.
    InnerRows narrowed(int64_t width) const {
        InnerRows own = *this;
        own.multiplied.stride = own.written.stride = pad(width, 64);
        return own;
    }

    void clear_padding(int64_t t, int64_t width) const { written.clear_padding(t, width); }

  private:
    static Rows<T> before(const Rows<W>& rows, Arena& arena, int64_t count) {
        if constexpr (Rows<W>::IS_QUANTIZED)
            return {arena, count, rows.stride};
        else
            return rows;
    }
};

// Where the last product of a block goes.
struct Target {
    float* to;  // [T][hidden, padded]
    bool is_sum;  // it is added to what is there, or else written
    float scale;  // of the product
    const float* factors = nullptr;  // [T], of each token as well; null: all are 1

    Target times(double factor) const { return {to, is_sum, scale * float(factor), factors}; }
    Target times(const float* of_tokens) const { return {to, is_sum, scale, of_tokens}; }
};

template <class T, class W> struct Stream {
    const Model& model;
    const Batch& batch;
    const int64_t num_tokens;
    const int64_t stride;
    float* x;      // [T][stride]
    float* added;  // output of a sublayer's blocks, if a norm follows it: likewise
    float* sum;    // of those of sublayers side by side, if there are any: likewise
    float* others;     // the further streams, if there are any: likewise, one after the other
    float* predicted;  // the first stream as it was predicted: likewise
    Rows<W> normed;
    Rows<T> plain;  // if W is Group: the same rows for plain matrices, if there are any
    Token* tokens;

    Stream(const Model& m, const Batch& b, float* residual, bool has_post_norms, bool has_sums, bool has_plain,
           Arena& arena)
        : model(m), batch(b), num_tokens(b.num_tokens), stride(pad(m.hidden, LANES)),
          x(residual ? residual : arena.allocate<float>(num_tokens * stride)),
          added(arena.allocate<float>(has_post_norms ? num_tokens * stride : 0)),
          sum(arena.allocate<float>(has_sums ? num_tokens * stride : 0)),
          others(residual ? residual + num_tokens * stride : arena.allocate<float>(num_further() * num_tokens * stride)),
          predicted(arena.allocate<float>(m.streams.count ? num_tokens * stride : 0)), normed(arena, num_tokens, m.hidden),
          plain(arena, has_plain ? num_tokens : 0, m.hidden), tokens(arena.allocate<Token>(num_tokens)) {}

    // Called before the threads start.
    void prepare() const {
        for (int64_t row = 0; row < batch.num_rows; row++)
            for (int32_t t = batch.row_offsets[row], i = 0; t < batch.row_offsets[row + 1]; t++, i++)
                tokens[t] = {batch.cache_lengths[row] + i, batch.slots[row]};
    }

    int64_t num_further() const { return model.streams.count ? model.streams.count - 1 : 0; }

    // Stream i of the further ones.
    float* further(int64_t i) const { return others + i * num_tokens * stride; }

    void embed(int64_t t) const {
        const int64_t token = batch.input_ids[t], hidden = model.hidden;
        const float scale = float(model.embedding_scale);
        float* to = x + t * stride;
        if (model.embedding) {
            const T* from = static_cast<const T*>(model.embedding) + token * hidden;
            for (int64_t k = 0; k < hidden; k++) to[k] = to_float(from[k]) * scale;
        } else {
            if (model.embedding_groups.columns)
                read_column(model.embedding_groups, token, hidden, to, static_cast<const Group*>(nullptr));
            else if (model.head.num_bits > 8)
                read_column(model.head, token, hidden, to, static_cast<const T*>(nullptr));
            else
                read_column(model.head, token, hidden, to, static_cast<const Group*>(nullptr));
            for (int64_t k = 0; k < hidden; k++) to[k] *= scale;
        }
        for (int64_t k = hidden; k < stride; k++) to[k] = 0;
    }

    // A token's rows for the first products of a block, after the norm, if there is one.
    void enter(int64_t t, const float* norm, bool is_rounded_read, bool is_plain_read) const {
        if (is_rounded_read) enter(t, norm, normed);
        if (is_plain_read) enter(t, norm, plain);
    }

    // As `enter`, of another row, without a norm but with factors, unless these are null.
    void enter_row(const float* from, int64_t t, bool is_rounded_read, bool is_plain_read,
                   const float* factors = nullptr) const {
        if (is_rounded_read) scale_row(from, factors, normed, t);
        if (is_plain_read) scale_row(from, factors, plain, t);
    }

    // One of the first products of a block: of all rows that `enter` made.
    template <class Use> void multiply(Team& team, const Matrix& matrix, int unit_panels, Use use) const {
        multiply_all(team, matrix, normed, plain, unit_panels, use);
    }

    // A product of all rows of those.
    template <class Use>
    void multiply(Team& team, const Matrix& matrix, const InnerRows<T, W>& rows, int unit_panels, Use use) const {
        multiply_all(team, matrix, rows.multiplied, rows.written, unit_panels, use);
    }

    // One of the first products of a block -> `to` [T][columns]. `columns`: at least those of the product, padded to 16.
    // `factors`: of each column; null: all are 1.
    void keep_product(Team& team, const Matrix& matrix, float* to, int64_t columns,
                      const float* factors = nullptr) const {
        multiply(team, matrix, UNIT_PANELS, Keep{to, columns, factors});
    }

    // Likewise of other rows, with a matrix of their format.
    template <class R> void keep_product(Team& team, const Matrix& matrix, const R& rows, float* to, int64_t columns) const {
        linear(team, matrix, rows, num_tokens, UNIT_PANELS, Keep{to, columns, nullptr});
    }

    // Where a sublayer's first block leaves its product: in `added`, if a norm follows.
    Target first_target(bool is_normed) const {
        return is_normed ? Target{added, false, 1.0f} : Target{x, true, float(model.residual_scale)};
    }

    // The last product of a block.
    void leave(Team& team, const Matrix& matrix, const InnerRows<T, W>& rows, int64_t width,
               const Target& target) const {
        if (Rows<W>::IS_QUANTIZED && !is_plain<W>(matrix)) {
            team.share_rows(num_tokens, [&](int64_t t) {
                convert_row(rows.written.values + t * rows.written.stride, width, rows.multiplied, t);
            });
            team.wait();
        }
        const auto add = [&](int64_t column, int64_t row, int count, const float* c, int tile_stride, int tile_width) {
            add_product(column, row, count, c, tile_stride, tile_width, target);
        };
        multiply_all(team, matrix, rows.multiplied, rows.written, UNIT_PANELS, add);
        team.wait();
    }

    // Adds what a sublayer's blocks left in `added`, after its norms, and scales the result. `is_last`: of sublayers
    // side by side.
    void end(int64_t t, const Sublayer& sublayer, bool is_last) const {
        float *own = added + t * stride, *all = sum + t * stride, *to = x + t * stride;
        const float scale = float(model.residual_scale);
        if (sublayer.corrects) return add_to_further(t, own, sublayer.post_norm);
        if (sublayer.is_continued || is_last) add_normalized(own, sublayer.post_norm, 1, all, is_last);
        if (sublayer.is_continued) return;
        if (sublayer.adds_input) add_normalized(to, sublayer.pre_norm, 1, all, true);
        if (is_last && sublayer.sum_norm)
            add_normalized(all, sublayer.sum_norm, scale, to, true);
        else if (is_last)
            for (int64_t k = 0; k < stride; k += LANES) store16(to + k, load16(to + k) + load16(all + k) * scale);
        else if (sublayer.post_norm)
            add_normalized(own, sublayer.post_norm, scale, to, true);
        if (sublayer.scale == 1) return;
        for (int64_t k = 0; k < stride; k += LANES) store16(to + k, load16(to + k) * float(sublayer.scale));
    }

    // A token's final hidden state.
    void finish(int64_t t, T* to) const {
        const float *from = x + t * stride, *weight = model.final_norm;
        const float scale = inverse_rms(from, model.hidden, float(model.eps));
        for (int64_t k = 0; k < model.hidden; k++) store1(to + k, from[k] * scale * weight[k]);
    }

  private:
    // Keeps the tiles of a product, times factors of its columns.
    struct Keep {
        float* to;
        int64_t columns;
        const float* factors;

        void operator()(int64_t column, int64_t row, int count, const float* c, int tile_stride, int width) const {
            for (int r = 0; r < count; r++)
                for (int k = 0; k < width; k += LANES) {
                    const f32x16 x = load16(c + r * tile_stride + k);
                    store16(to + (row + r) * columns + column + k, factors ? x * load16(factors + column + k) : x);
                }
        }
    };

    // The product of all rows with a matrix: of `rows`, or if it is plain of `unrounded`, which are the same.
    template <class Use>
    void multiply_all(Team& team, const Matrix& matrix, const Rows<W>& rows, const Rows<T>& unrounded, int unit_panels,
                      Use use) const {
        if constexpr (Rows<W>::IS_QUANTIZED)
            if (is_plain<W>(matrix)) return linear(team, matrix, unrounded, num_tokens, unit_panels, use);
        linear(team, matrix, rows, num_tokens, unit_panels, use);
    }

    void add_normalized(const float* from, const float* weight, float factor, float* to, bool is_sum) const {
        const float scale = inverse_rms(from, model.hidden, float(model.eps)) * factor;
        for (int64_t k = 0; k < stride; k += LANES) {
            const f32x16 normalized = load16(from + k) * scale * load16(weight + k);
            store16(to + k, is_sum ? load16(to + k) + normalized : normalized);
        }
    }

    void add_to_further(int64_t t, const float* from, const float* weight) const {
        const float scale = inverse_rms(from, model.hidden, float(model.eps));
        for (int64_t k = 0; k < stride; k += LANES) {
            const f32x16 normalized = load16(from + k) * scale * load16(weight + k);
            for (int64_t i = 0; i < num_further(); i++) {
                float* to = further(i) + t * stride + k;
                store16(to, load16(to) + normalized);
            }
        }
    }

    template <class R> void scale_row(const float* from, const float* factors, const R& rows, int64_t t) const {
        if (factors)
            put_row(rows, t, stride, [&](int64_t k) { return load16(from + k) * load16(factors + k); });
        else
            convert_row(from, stride, rows, t);
    }

    template <class R> void enter(int64_t t, const float* norm, const R& rows) const {
        if (norm)
            normalize(x + t * stride, norm, model.hidden, float(model.eps), rows, t);
        else
            convert_row(x + t * stride, stride, rows, t);
    }

    void add_product(int64_t column, int64_t row, int count, const float* c, int tile_stride, int width,
                     const Target& target) const {
        float* to = target.to + row * stride + column;
        for (int r = 0; r < count; r++, c += tile_stride, to += stride) {
            const float scale = target.factors ? target.scale * target.factors[row + r] : target.scale;
            for (int k = 0; k < width; k += LANES) {
                const f32x16 scaled = load16(c + k) * scale;
                store16(to + k, target.is_sum ? load16(to + k) + scaled : scaled);
            }
        }
    }
};
