// The block of attention: queries and keys are rotated right after their product, and keys and values then go into
// their slots.
#pragma once

#include "latent_heads.h"

template <class T, class W> struct Attention {
    static constexpr int64_t STAGES = 9;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const AttentionMemory<T> memory;
    const InnerRows<T, W> attended;
    float* const gates;  // of what the heads attend to, if there are any [T][width]
    const LatentHeads<T, W> latent;
    float* const heads;  // if norms span all heads: queries, keys and values [T][columns]

    // With memory for each such block of a piece.
    Attention(const Stream<T, W>& s, const Sublayers& sublayers, int num_threads, Arena& arena)
        : stream(s), memory(sublayers, s.batch, num_threads, arena),
          attended(arena, s.num_tokens, sublayers.most(&Sublayer::attention, width_of)),
          gates(arena.allocate<float>(s.num_tokens *
                                      sublayers.most(&Sublayer::attention, [](const AttentionBlock& block) {
                                          return block.has_output_gate ? width_of(block) : 0;
                                      }))),
          latent(s, sublayers, arena),
          heads(arena.allocate<float>(s.num_tokens *
                                      sublayers.most(&Sublayer::attention, [](const AttentionBlock& block) {
                                          return block.are_heads_normed_as_one ? block.qkv.columns : 0;
                                      }))) {}

    // Called before the threads start.
    void prepare() const { memory.prepare(); }

    static bool reads(const AttentionBlock& block, bool plain) {
        return block.is_latent() ? LatentHeads<T, W>::reads(block, plain) : is_plain<W>(block.qkv) == plain;
    }

    // Called in the stage before `run`.
    void begin(const AttentionBlock& block, int64_t t) const {
        if (block.is_latent()) latent.begin(block, t);
        rows_of(block).clear_padding(t, width_of(block));
    }

    void run(Team& team, const AttentionBlock& block, const Target& target) const {
        const InnerRows<T, W> rows = rows_of(block);
        if (block.is_latent())
            latent.project(team, block, memory.queries, [&](int64_t t) { return slot_of(block, t); });
        else
            project_heads(team, block);
        const SlotAttention<T> attention(block, stream.batch, memory, rows.written);
        const AttentionScratch<T> own = memory.scratch_of(team.rank);
        team.share(attention.list.count, [&](int64_t i) { attention.attend(attention.list.tasks[i], own); });
        team.wait();
        if (block.has_output_gate) gate(team, block, rows.written);
        if (block.is_latent()) latent.expand(team, block, rows.written);
        const InnerRows<T, W> outputs = block.is_latent() ? latent.values_of(block) : rows;
        stream.leave(team, block.out, outputs, block.output_width(), target.times(block.output_scale));
    }

  private:
    static int64_t width_of(const AttentionBlock& block) { return block.num_heads * block.head_dim; }

    // Heads that are rotated: queries, and keys if the block has any of its own.
    static int64_t num_rotated_of(const AttentionBlock& block) {
        return block.num_heads + (block.is_query_only ? 0 : block.num_kv_heads);
    }

    InnerRows<T, W> rows_of(const AttentionBlock& block) const { return attended.narrowed(width_of(block)); }

    // Queries, keys and values of all tokens, each in its place.
    void project_heads(Team& team, const AttentionBlock& block) const {
        const int64_t dim = block.head_dim, columns = block.qkv.columns;
        const auto place = [&](int64_t column, int64_t row, int count, float* c, int stride, int width) {
            const int64_t head = column / dim;
            if (block.input_scale != 1)
                for (int r = 0; r < count; r++) scale(c + r * stride, width, float(block.input_scale));
            if (block.are_heads_normed_as_one) {
                for (int r = 0; r < count; r++)
                    std::memcpy(heads + (row + r) * columns + column, c + r * stride, width * sizeof(float));
                return;
            }
            const bool is_key = head >= block.num_heads && head < num_rotated_of(block);
            if (is_key && block.num_common)
                return keep_shared(block, head - block.num_heads, row, count, c, stride);
            if (is_key && block.are_keys_values) keep_values(block, head - block.num_heads, row, count, c, stride);
            if (block.query_norm && head < num_rotated_of(block)) {
                const float* weight = head < block.num_heads ? block.query_norm : block.key_norm;
                for (int r = 0; r < count; r++) normalize_heads(c + r * stride, weight, dim);
            }
            place_head(block, head, row, count, c, stride);
        };
        stream.multiply(team, block.qkv, int(dim / LANES), place);
        team.wait();
        if (!block.are_heads_normed_as_one) return;
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            float *queries = heads + t * columns, *keys = queries + block.num_heads * dim;
            for (int64_t head = 0; block.are_keys_values && head < block.num_kv_heads; head++)
                keep_values(block, head, t, 1, keys + head * dim, 0);
            normalize_heads(queries, block.query_norm, block.num_heads * dim);
            if (!block.is_query_only) normalize_heads(keys, block.key_norm, block.num_kv_heads * dim);
            for (int64_t head = 0; head < columns / dim; head++) place_head(block, head, t, 1, queries + head * dim, 0);
        });
        team.wait();
    }

    // What the heads attend to, times the sigmoid of its gates.
    void gate(Team& team, const AttentionBlock& block, const Rows<T>& written) const {
        const int64_t width = width_of(block);
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            T* to = written.values + t * written.stride;
            for (int64_t k = 0; k < width; k += LANES)
                store16(to + k, load16(to + k) * sigmoid16(load16(gates + t * width + k)));
        });
        team.wait();
    }

    static void scale(float* c, int width, float factor) {
        for (int k = 0; k < width; k += LANES) store16(c + k, load16(c + k) * factor);
    }

    void normalize_heads(float* c, const float* weight, int64_t width) const {
        const float scale = inverse_rms(c, width, float(stream.model.eps));
        for (int64_t k = 0; k < width; k += LANES) store16(c + k, load16(c + k) * scale * load16(weight + k));
    }

    // One head of some tokens: rotated if it is a query or a key, and written to its place.
    void place_head(const AttentionBlock& block, int64_t head, int64_t first, int count, const float* c,
                    int stride) const {
        const int64_t dim = block.head_dim, num_heads = block.num_heads, num_rotated = num_rotated_of(block);
        const int64_t heads_per_kv_head = num_heads / block.num_kv_heads;
        const int64_t first_value = num_rotated + (block.has_output_gate ? num_heads : 0);
        const float query_scale = float(block.scale * LOG2_E);  // scores are logarithms to base 2
        if (head >= first_value) return keep_values(block, head - first_value, first, count, c, stride);
        for (int i = 0; i < count; i++, c += stride) {
            const int64_t t = first + i;
            const int64_t position = stream.tokens[t].position;
            if (head < num_heads) {
                const int64_t kv_head = head / heads_per_kv_head, member = head % heads_per_kv_head;
                T* to = memory.queries + ((kv_head * stream.num_tokens + t) * heads_per_kv_head + member) * dim;
                rotate(block, c, position, query_scale, to);
            } else if (head < num_rotated) {
                rotate(block, c, position, 1.0f, slot_of(block, t) + (head - num_heads) * dim);
            } else {
                float* to = gates + t * width_of(block) + (head - num_rotated) * dim;
                std::memcpy(to, c, dim * sizeof(float));
            }
        }
    }

    // Writes one head of some tokens' values into their slots.
    void keep_values(const AttentionBlock& block, int64_t kv_head, int64_t first, int count, const float* c,
                     int stride) const {
        const int64_t dim = block.head_dim, offset = stream.batch.groups[block.group].value_offset;
        for (int i = 0; i < count; i++, c += stride) {
            const float factor = block.has_value_norm ? inverse_rms(c, dim, float(stream.model.eps)) : 1.0f;
            T* to = slot_of(block, first + i) + offset + kv_head * dim;
            for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(c + d) * factor);
        }
    }

    // Writes one head of some tokens' keys and values, which have elements in common.
    void keep_shared(const AttentionBlock& block, int64_t kv_head, int64_t first, int count, float* c, int stride) const {
        const int64_t dim = block.head_dim, turning = dim - block.num_common;
        for (int i = 0; i < count; i++, c += stride) {
            const float factor = inverse_rms(c, dim, float(stream.model.eps));
            T* to = slot_of(block, first + i) + kv_head * block.head_stride();
            for (int64_t d = turning; d < dim; d += LANES) store16(to + d, load16(c + d) * factor);
            for (int64_t d = 0; d < turning; d += LANES) {
                const f32x16 value = load16(c + d) * factor;
                store16(to + dim + d, value);
                store16(c + d, value * load16(block.key_norm + d));
            }
            turn(block, c, turning / 2, stream.tokens[first + i].position, 1.0f, to);
        }
    }

    // A token's keys.
    T* slot_of(const AttentionBlock& block, int64_t t) const {
        const CacheGroup& group = stream.batch.groups[block.group];
        const Token token = stream.tokens[t];
        return static_cast<T*>(group.blocks) + block.plane * group.plane_stride + token.slot * group.slot_stride +
               token.position * group.token_stride;
    }

    // The elements of a head are those of its first half and of its second, which rotate with them. A multiple of 16 of
    // each comes first; if 8 are left of each, these are the last vector. So are the cosines and sines of the table.
    static void rotate(const AttentionBlock& block, const float* c, int64_t position, float scale, T* to) {
        const int64_t dim = block.head_dim, half = dim / (2 * LANES) * LANES;
        if (!block.rope) {
            for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(c + d) * scale);
            return;
        }
        if (block.num_common) {
            const int64_t turning = dim - block.num_common;
            turn(block, c, turning / 2, position, scale, to);
            for (int64_t d = turning; d < dim; d += LANES) store16(to + d, load16(c + d) * scale);
            return;
        }
        turn(block, c, half, position, scale, to);
        const float* last = block.rope + position * dim + 2 * half;
        if (dim > 2 * half) rotate_last(c + 2 * half, last, scale, to + 2 * half);
    }

    // The first `count` elements, and as many after them, which rotate with them.
    static void turn(const AttentionBlock& block, const float* c, int64_t count, int64_t position, float scale, T* to) {
        const float* cosines = block.rope + position * block.head_dim;
        const float* sines = cosines + block.head_dim / (2 * LANES) * LANES;
        for (int64_t d = 0; d < count; d += LANES) {
            f32x16 low = load16(c + d), high = load16(c + count + d);
            f32x16 cosine = load16(cosines + d) * scale, sine = load16(sines + d) * scale;
            store16(to + d, low * cosine - high * sine);
            store16(to + count + d, high * cosine + low * sine);
        }
    }

    // Eight elements, and the eight that rotate with them.
    static void rotate_last(const float* c, const float* angles, float scale, T* to) {
        constexpr int HALF = LANES / 2;
        constexpr int32_t numbers[LANES]{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const f32x16 x = load16(c), both = load16(angles) * scale;
        const f32x16 cosine = exchange<HALF, false>(both, both), sine = exchange<HALF, true>(both, both);
        const f32x16 along = x * cosine, across = swap<HALF>(x) * sine;
        store16(to, select(load<i32x16>(numbers) < HALF, along - across, along + across));
    }
};
