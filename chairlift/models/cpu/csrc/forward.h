// A decoder's forward pass in one parallel region: see models/decoder.py for the same in torch, operator by operator.
//
// The residual stream is float32. Products multiply the model's number format T, or 8-bit integers in groups if W is
// Group and the matrix is not plain (plain ones are of the format T). Queries and keys are rotated right after their
// product, and keys and values then go into their slots. All threads of a Team run every function below that takes one.
#pragma once

#include "linear.h"
#include "attention/slot_attention.h"

struct Token {
    int32_t position;
    int64_t slot;  // offset of the slot in the blocks
};

template <class T, class W> struct Forward {
    const Model& model;
    const Batch& batch;
    const int64_t heads_per_kv_head, num_tokens;
    const float query_scale;  // scores are logarithms to base 2
    float* x;                 // the residual stream [T][stride]
    int64_t x_stride;
    float* added;  // output of attention or MLP, if a norm follows it: likewise
    float* heads;  // if norms span all heads: queries, keys and values [T][num_columns]
    Rows<W> normed, projected, activated;
    Token* tokens;
    Rows<T> plain;     // if W is Group: normed rows for plain matrices, if there are any
    Rows<T> attended;  // likewise: before quantization
    Rows<T> gated;     // likewise
    SlotAttention<T> attention;
    Counter* counters;
    int num_threads;

    static constexpr int64_t STAGES_PER_LAYER = 12;
    static constexpr int64_t OTHER_STAGES = 8;

    int64_t num_counters() const { return (OTHER_STAGES + STAGES_PER_LAYER * model.num_layers) * num_threads; }

    Forward(const Model& m, const Batch& b, Arena& arena, int threads)
        : model(m), batch(b), heads_per_kv_head(m.num_heads / m.num_kv_heads), num_tokens(b.num_tokens),
          query_scale(float(m.attention_scale * LOG2_E)),
          x(arena.allocate<float>(b.num_tokens * pad(m.hidden, LANES))), x_stride(pad(m.hidden, LANES)),
          added(arena.allocate<float>(m.layers->post_attention_norm ? b.num_tokens * x_stride : 0)),
          heads(arena.allocate<float>(m.are_heads_normed_as_one ? b.num_tokens * m.layers->qkv.columns : 0)),
          normed(arena, b.num_tokens, m.hidden), projected(arena, b.num_tokens, m.num_heads * m.head_dim),
          activated(arena, b.num_tokens, m.intermediate), tokens(arena.allocate<Token>(b.num_tokens)),
          plain(arena, has_plain(m) ? b.num_tokens : 0, m.hidden), attended(before(projected, arena)),
          gated(before(activated, arena)), attention(m, b, threads, arena, attended.values, attended.stride),
          num_threads(threads) {
        counters = arena.allocate<Counter>(num_counters());
    }

    // Where a product's rows are written in the model's format: in place, or in rows of their own before quantization.
    Rows<T> before(const Rows<W>& rows, Arena& arena) const {
        if constexpr (Rows<W>::IS_QUANTIZED)
            return {arena, num_tokens, rows.stride};
        else
            return rows;
    }

    // Whether a matrix is not quantized although others are.
    static bool is_plain(const Matrix& matrix) { return Rows<W>::IS_QUANTIZED && matrix.num_bits > 8; }

    static bool has_plain(const Model& model) {
        for (const Layer* layer = model.layers; layer < model.layers + model.num_layers; layer++)
            if (is_plain(layer->qkv) || is_plain(layer->gate_up)) return true;
        return false;
    }

    // The product of all rows with a matrix: of `rows`, or if it is plain of `unrounded`, which are the same.
    template <class Use>
    void multiply_all(Team& team, const Matrix& matrix, const Rows<W>& rows, const Rows<T>& unrounded, int unit_panels,
                      Use use) const {
        if constexpr (Rows<W>::IS_QUANTIZED)
            if (is_plain(matrix)) return linear(team, matrix, unrounded, num_tokens, unit_panels, use);
        linear(team, matrix, rows, num_tokens, unit_panels, use);
    }

    // Called before the threads start.
    void prepare() const {
        std::memset((void*)counters, 0, sizeof(Counter) * num_counters());
        attention.prepare();
        for (int64_t row = 0; row < batch.num_rows; row++)
            for (int32_t t = batch.row_offsets[row], i = 0; t < batch.row_offsets[row + 1]; t++, i++)
                tokens[t] = {batch.cache_lengths[row] + i, batch.slots[row] * batch.slot_stride};
    }

    void embed(int64_t t) const {
        const int64_t token = batch.input_ids[t], hidden = model.hidden;
        const float scale = float(model.embedding_scale);
        float* to = x + t * x_stride;
        if (model.embedding) {
            const T* from = static_cast<const T*>(model.embedding) + token * hidden;
            for (int64_t k = 0; k < hidden; k++) to[k] = to_float(from[k]) * scale;
        } else {
            if (is_plain(model.head))
                read_column(model.head, token, hidden, to, static_cast<const T*>(nullptr));
            else
                read_column(model.head, token, hidden, to, static_cast<const W*>(nullptr));
            for (int64_t k = 0; k < hidden; k++) to[k] *= scale;
        }
        for (int64_t k = hidden; k < x_stride; k++) to[k] = 0;
        attended.clear_padding(t, model.num_heads * model.head_dim);
        gated.clear_padding(t, pad(model.intermediate, LANES));
    }

    // Queries, keys and values of all tokens, each in its place.
    void project_heads(Team& team, int64_t index) const {
        const Layer& layer = model.layers[index];
        const int64_t dim = model.head_dim, columns = layer.qkv.columns;
        const auto place = [&](int64_t column, int64_t row, int count, float* c, int stride, int width) {
            const int64_t head = column / dim;
            if (model.are_heads_normed_as_one) {
                for (int r = 0; r < count; r++)
                    std::memcpy(heads + (row + r) * columns + column, c + r * stride, width * sizeof(float));
                return;
            }
            if (layer.query_norm && head < model.num_heads + model.num_kv_heads)
                for (int r = 0; r < count; r++) normalize_heads(c + r * stride, weight_of(layer, head), dim);
            place_head(index, head, row, count, c, stride);
        };
        multiply_all(team, layer.qkv, normed, plain, int(dim / LANES), place);
        team.wait();
        if (!model.are_heads_normed_as_one) return;
        team.share_rows(num_tokens, [&](int64_t t) {
            float *queries = heads + t * columns, *keys = queries + model.num_heads * dim;
            normalize_heads(queries, layer.query_norm, model.num_heads * dim);
            normalize_heads(keys, layer.key_norm, model.num_kv_heads * dim);
            for (int64_t head = 0; head < columns / dim; head++) place_head(index, head, t, 1, queries + head * dim, 0);
        });
        team.wait();
    }

    const float* weight_of(const Layer& layer, int64_t head) const {
        return head < model.num_heads ? layer.query_norm : layer.key_norm;
    }

    void normalize_heads(float* c, const float* weight, int64_t width) const {
        const float scale = inverse_rms(c, width, float(model.eps));
        for (int64_t k = 0; k < width; k += LANES) store16(c + k, load16(c + k) * scale * load16(weight + k));
    }

    // One head of some tokens: rotated if it is a query or a key, and written to its place.
    void place_head(int64_t index, int64_t head, int64_t first, int count, const float* c, int stride) const {
        const Layer& layer = model.layers[index];
        const int64_t dim = model.head_dim, num_keys = model.num_kv_heads;
        T* cache = static_cast<T*>(batch.blocks) + index * batch.layer_stride;
        for (int i = 0; i < count; i++, c += stride) {
            const int64_t t = first + i;
            const Token token = tokens[t];
            T* slot = cache + token.slot + token.position * batch.token_stride;
            if (head < model.num_heads) {
                const int64_t kv_head = head / heads_per_kv_head, member = head % heads_per_kv_head;
                T* to = attention.queries + ((kv_head * num_tokens + t) * heads_per_kv_head + member) * dim;
                rotate(layer, c, token.position, query_scale, to);
            } else if (head < model.num_heads + num_keys) {
                rotate(layer, c, token.position, 1.0f, slot + (head - model.num_heads) * dim);
            } else {
                T* to = slot + batch.value_offset + (head - model.num_heads - num_keys) * dim;
                for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(c + d));
            }
        }
    }

    void rotate(const Layer& layer, const float* c, int64_t position, float scale, T* to) const {
        const int64_t dim = model.head_dim, half = dim / 2;
        if (!layer.rope) {
            for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(c + d) * scale);
            return;
        }
        const float *cosines = layer.rope + position * dim, *sines = cosines + half;
        for (int64_t d = 0; d < half; d += LANES) {
            f32x16 low = load16(c + d), high = load16(c + half + d);
            f32x16 cosine = load16(cosines + d) * scale, sine = load16(sines + d) * scale;
            store16(to + d, low * cosine - high * sine);
            store16(to + half + d, high * cosine + low * sine);
        }
    }

    void run_layer(Team& team, int64_t index, const AttentionScratch<T>& scratch) const {
        const Layer& layer = model.layers[index];
        const auto add = [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
            add_product(column, row, count, c, stride, width);
        };
        const auto activate = [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
            T* to = gated.values + row * gated.stride + column / 2;
            if (model.is_gelu)
                gate<true>(c, stride, count, width, to);
            else
                gate<false>(c, stride, count, width, to);
        };
        const float* after_last = index ? model.layers[index - 1].post_mlp_norm : nullptr;
        normalize_all(team, after_last, layer.pre_attention_norm, layer.qkv);
        project_heads(team, index);
        const TaskList& list = attention.tasks;
        team.share(list.count, [&](int64_t i) { attention.attend(index, list.tasks[i], scratch); });
        team.wait();
        convert_all(team, attended, model.num_heads * model.head_dim, projected, layer.out);
        multiply_all(team, layer.out, projected, attended, UNIT_PANELS, add);
        team.wait();
        normalize_all(team, layer.post_attention_norm, layer.pre_mlp_norm, layer.gate_up);
        multiply_all(team, layer.gate_up, normed, plain, UNIT_PANELS, activate);
        team.wait();
        convert_all(team, gated, pad(model.intermediate, LANES), activated, layer.down);
        multiply_all(team, layer.down, activated, gated, UNIT_PANELS, add);
        team.wait();
    }

    template <bool IS_GELU> void gate(const float* c, int stride, int count, int width, T* to) const {
        for (int r = 0; r < count; r++, c += stride, to += gated.stride)
            for (int k = 0; k < width; k += 2 * LANES) {
                const f32x16 gate = load16(c + k);
                store16(to + k / 2, (IS_GELU ? gelu16(gate) : silu16(gate)) * load16(c + k + LANES));
            }
    }

    // Adds a product's tile to the residual stream, or writes it to `added` if a norm comes first.
    void add_product(int64_t column, int64_t row, int count, const float* c, int stride, int width) const {
        const int64_t start = row * x_stride + column;
        if (model.layers->post_attention_norm) {
            for (int r = 0; r < count; r++)
                std::memcpy(added + start + r * x_stride, c + r * stride, width * sizeof(float));
            return;
        }
        const float scale = float(model.residual_scale);
        float* to = x + start;
        for (int r = 0; r < count; r++, c += stride, to += x_stride)
            for (int k = 0; k < width; k += LANES) store16(to + k, load16(to + k) + load16(c + k) * scale);
    }

    // Adds `added` after its norm, if there is one, to the residual stream; then makes the rows for the next matrix.
    void normalize_all(Team& team, const float* after, const float* before, const Matrix& next) const {
        team.share_rows(num_tokens, [&](int64_t t) {
            if (after) add_normalized(t, after);
            if (is_plain(next))
                enter(t, before, plain);
            else
                enter(t, before, normed);
        });
        team.wait();
    }

    template <class R> void enter(int64_t t, const float* norm, const R& rows) const {
        if (norm)
            normalize(x + t * x_stride, norm, model.hidden, float(model.eps), rows, t);
        else
            convert_row(x + t * x_stride, x_stride, rows, t);
    }

    void add_normalized(int64_t t, const float* weight) const {
        const float* from = added + t * x_stride;
        const float scale = inverse_rms(from, model.hidden, float(model.eps)) * float(model.residual_scale);
        float* to = x + t * x_stride;
        for (int64_t k = 0; k < x_stride; k += LANES)
            store16(to + k, load16(to + k) + load16(from + k) * scale * load16(weight + k));
    }

    void convert_all(Team& team, const Rows<T>& from, int64_t width, const Rows<W>& to, const Matrix& next) const {
        if (!Rows<W>::IS_QUANTIZED || is_plain(next)) return;
        team.share_rows(num_tokens, [&](int64_t t) { convert_row(from.values + t * from.stride, width, to, t); });
        team.wait();
    }

    // -> final hidden states [T][hidden]
    void run(Team team, T* hidden) const {
        const AttentionScratch<T> own = attention.scratch_of(team.rank);
        team.share_rows(num_tokens, [&](int64_t t) { embed(t); });
        team.wait();
        for (int64_t layer = 0; layer < model.num_layers; layer++) run_layer(team, layer, own);
        const float* after_last = model.layers[model.num_layers - 1].post_mlp_norm;
        team.share_rows(num_tokens, [&](int64_t t) {
            if (after_last) add_normalized(t, after_last);
            const float *from = x + t * x_stride, *weight = model.final_norm;
            const float scale = inverse_rms(from, model.hidden, float(model.eps));
            T* to = hidden + t * model.hidden;
            for (int64_t k = 0; k < model.hidden; k++) store1(to + k, from[k] * scale * weight[k]);
        });
    }
};
