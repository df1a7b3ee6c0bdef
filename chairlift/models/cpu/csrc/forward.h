// A Llama's forward pass in one parallel region: see models/llama.py for the same in torch, operator by operator.
//
// Residuals are float32; what is multiplied is the model's number format, or int8 with one scale per row. Rotary
// embedding happens where queries and keys leave their product, and keys and values go from there into their slots.
// Every function below that takes a Team is run by all of its threads.
#pragma once

#include "linear.h"
#include "slot_attention.h"

struct Token {
    int32_t position;
    int64_t slot;  // offset of the slot in the blocks
};

template <class T, class W> struct Forward {
    const Model& model;
    const Batch& batch;
    const int64_t heads_per_group, num_tokens;
    float* x;  // residuals [T][stride]
    int64_t x_stride;
    Rows<W> normed, projected, activated;
    Token* tokens;
    T* attended;  // where W is int8: before quantisation
    T* gated;     // likewise
    int64_t attended_stride, gated_stride;
    SlotAttention<T> attention;
    Counter* counters;
    int num_threads;

    static constexpr int64_t STAGES_PER_LAYER = 12;
    static constexpr int64_t OTHER_STAGES = 8;

    int64_t num_counters() const { return (OTHER_STAGES + STAGES_PER_LAYER * model.num_layers) * num_threads; }

    Forward(const Model& m, const Batch& b, Arena& arena, int threads)
        : model(m), batch(b), heads_per_group(m.num_heads / m.num_kv_heads), num_tokens(b.num_tokens),
          x(arena.take<float>(b.num_tokens * pad(m.hidden, LANES))), x_stride(pad(m.hidden, LANES)),
          normed(arena, b.num_tokens, m.hidden), projected(arena, b.num_tokens, m.num_heads * m.head_dim),
          activated(arena, b.num_tokens, m.intermediate), tokens(arena.take<Token>(b.num_tokens)),
          attended(before(projected, arena)), gated(before(activated, arena)), attended_stride(projected.stride),
          gated_stride(activated.stride), attention(m, b, threads, arena, attended, attended_stride),
          num_threads(threads) {
        counters = arena.take<Counter>(num_counters());
    }

    // Where a product's rows are written in the model's format: in place, or beside them if they are to be quantised.
    T* before(const Rows<W>& rows, Arena& arena) const {
        if constexpr (sizeof(W) == 1)
            return arena.take<T>(num_tokens * rows.stride);
        else
            return rows.values;
    }

    // Before the threads start.
    void prepare() const {
        std::memset((void*)counters, 0, sizeof(Counter) * num_counters());
        attention.prepare();
        for (int64_t row = 0; row < batch.num_rows; row++)
            for (int32_t t = batch.row_offsets[row], i = 0; t < batch.row_offsets[row + 1]; t++, i++)
                tokens[t] = {batch.cache_lengths[row] + i, batch.slots[row] * batch.slot_stride};
    }

    // ---- the stages ----

    void embed(int64_t t) const {
        const int64_t token = batch.input_ids[t], hidden = model.hidden;
        float* to = x + t * x_stride;
        if (model.embedding) {
            const T* from = static_cast<const T*>(model.embedding) + token * hidden;
            for (int64_t k = 0; k < hidden; k++) to[k] = to_float(from[k]);
        } else {
            constexpr int64_t PACK = Pack<W>;
            const W* from = static_cast<const W*>(model.head.panels) + token / LANES * LANES * model.head.depth +
                            token % LANES * PACK;
            for (int64_t k = 0; k < hidden; k++) {
                const W value = from[k / PACK * LANES * PACK + k % PACK];
                if constexpr (sizeof(W) == 1)
                    to[k] = value * model.head.scales[token];
                else
                    to[k] = to_float(value);
            }
        }
        for (int64_t k = hidden; k < x_stride; k++) to[k] = 0;
        if constexpr (sizeof(W) != 1) {
            projected.clear_padding(t, model.num_heads * model.head_dim);
            activated.clear_padding(t, pad(model.intermediate, LANES));
        }
    }

    // One head of some tokens, fresh from its product: rotated if it is a query or a key, and brought to its place.
    void place_head(int64_t layer, int64_t head, int64_t first, int count, const float* c, int stride) const {
        const int64_t dim = model.head_dim, num_keys = model.num_kv_heads;
        const float query_scale = LOG2_E / __builtin_sqrtf(float(dim));
        T* cache = static_cast<T*>(batch.blocks) + layer * batch.layer_stride;
        for (int i = 0; i < count; i++, c += stride) {
            const int64_t t = first + i;
            const Token token = tokens[t];
            T* slot = cache + token.slot + token.position * batch.token_stride;
            if (head < model.num_heads) {
                const int64_t group = head / heads_per_group, member = head % heads_per_group;
                T* to = attention.queries + ((group * num_tokens + t) * heads_per_group + member) * dim;
                rotate(c, token.position, query_scale, to);
            } else if (head < model.num_heads + num_keys) {
                rotate(c, token.position, 1.0f, slot + (head - model.num_heads) * dim);
            } else {
                T* to = slot + batch.value_offset + (head - model.num_heads - num_keys) * dim;
                for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(c + d));
            }
        }
    }

    void rotate(const float* c, int64_t position, float scale, T* to) const {
        const int64_t half = model.head_dim / 2;
        const float *cosines = model.rope + position * model.head_dim, *sines = cosines + half;
        for (int64_t d = 0; d < half; d += LANES) {
            f32x16 low = load16(c + d), high = load16(c + half + d);
            f32x16 cosine = load16(cosines + d) * scale, sine = load16(sines + d) * scale;
            store16(to + d, low * cosine - high * sine);
            store16(to + half + d, high * cosine + low * sine);
        }
    }

    void run_layer(Team& team, int64_t index, const AttentionScratch<T>& scratch) const {
        const Layer& layer = model.layers[index];
        const auto add_to_residual = [&](int64_t column, int64_t row, int count, const float* c, int stride,
                                         int width) {
            for (int r = 0; r < count; r++)
                for (int k = 0; k < width; k += LANES) {
                    float* to = x + (row + r) * x_stride + column + k;
                    store16(to, load16(to) + load16(c + r * stride + k));
                }
        };
        normalize_all(team, layer.input_norm);
        linear(team, layer.qkv, normed, num_tokens, int(model.head_dim / LANES),
               [&](int64_t column, int64_t row, int count, const float* c, int stride, int) {
                   place_head(index, column / model.head_dim, row, count, c, stride);
               });
        team.wait();
        const TaskList& list = attention.tasks;
        team.share(list.count, [&](int64_t i) { attention.attend(index, list.tasks[i], scratch); });
        team.wait();
        convert_all(team, attended, attended_stride, model.num_heads * model.head_dim, projected);
        linear(team, layer.out, projected, num_tokens, UNIT_PANELS, add_to_residual);
        team.wait();
        normalize_all(team, layer.post_norm);
        linear(team, layer.gate_up, normed, num_tokens, UNIT_PANELS,
               [&](int64_t column, int64_t row, int count, const float* c, int stride, int width) {
                   for (int r = 0; r < count; r++, c += stride) {
                       T* to = gated + (row + r) * gated_stride + column / 2;
                       for (int k = 0; k < width; k += 2 * LANES)
                           store16(to + k / 2, silu16(load16(c + k)) * load16(c + k + LANES));
                   }
               });
        team.wait();
        convert_all(team, gated, gated_stride, pad(model.intermediate, LANES), activated);
        linear(team, layer.down, activated, num_tokens, UNIT_PANELS, add_to_residual);
        team.wait();
    }

    void normalize_all(Team& team, const float* weight) const {
        team.share_rows(num_tokens, [&](int64_t t) {
            normalize(x + t * x_stride, weight, model.hidden, float(model.eps), normed, t);
        });
        team.wait();
    }

    void convert_all(Team& team, const T* from, int64_t stride, int64_t width, const Rows<W>& to) const {
        if (sizeof(W) != 1) return;
        team.share_rows(num_tokens, [&](int64_t t) { convert_row(from + t * stride, width, to, t); });
        team.wait();
    }

    // -> final hidden states [T][hidden]
    void run(Team team, T* hidden) const {
        const AttentionScratch<T> own = attention.scratch_of(team.rank);
        team.share_rows(num_tokens, [&](int64_t t) { embed(t); });
        team.wait();
        for (int64_t layer = 0; layer < model.num_layers; layer++) run_layer(team, layer, own);
        team.share_rows(num_tokens, [&](int64_t t) {
            const float *from = x + t * x_stride, *weight = model.final_norm;
            f32x16 squares{};
            for (int64_t k = 0; k < x_stride; k += LANES) squares += load16(from + k) * load16(from + k);
            const float scale = 1 / __builtin_sqrtf(sum16(squares) / model.hidden + float(model.eps));
            T* to = hidden + t * model.hidden;
            for (int64_t k = 0; k < model.hidden; k++) store1(to + k, from[k] * scale * weight[k]);
        });
    }
};
