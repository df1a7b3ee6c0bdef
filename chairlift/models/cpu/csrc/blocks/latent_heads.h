// The projections of latent attention (DeepSeek-V2, arXiv 2405.04434): a token's latent vector and turning key go into its
// slot, each head's matrix of keys multiplies its queries, and its matrix of values what it attends to.
#pragma once

#include "../attention/slot_attention.h"
#include "../stream.h"

template <class T, class W> struct LatentHeads {
    const Stream<T, W>& stream;
    float* const kept;          // latent vectors and turning keys, before the norm [T][head_dim, padded]
    float* const low;           // of which queries are made, before the norm, if there are any [T][rank, padded]
    const InnerRows<T, W> normed;  // the same after it
    const Rows<T> still;        // parts of queries that do not turn [T][heads][still_dim]
    const InnerRows<T, W> values;  // [T][heads][value_dim]

    LatentHeads(const Stream<T, W>& s, const Sublayers& sublayers, Arena& arena)
        : stream(s), kept(arena.allocate<float>(s.num_tokens * most(sublayers, kept_of))),
          low(arena.allocate<float>(s.num_tokens * most(sublayers, rank_of))),
          normed(arena, most(sublayers, rank_of) ? s.num_tokens : 0, most(sublayers, rank_of)),
          still(arena, most(sublayers, still_of) ? s.num_tokens : 0, most(sublayers, still_of)),
          values(arena, most(sublayers, kept_of) ? s.num_tokens : 0, most(sublayers, width_of)) {}

    static bool reads(const AttentionBlock& block, bool plain) {
        return is_plain<W>(block.kv_down) == plain ||
               is_plain<W>(block.query_down.columns ? block.query_down : block.qkv) == plain;
    }

    // Called in the stage before `project`.
    void begin(const AttentionBlock& block, int64_t t) const { values_of(block).clear_padding(t, width_of(block)); }

    // Rows of all heads' outputs.
    InnerRows<T, W> values_of(const AttentionBlock& block) const { return values.narrowed(width_of(block)); }

    // Queries of all tokens -> `queries` [T][heads][head_dim], scaled; `slot_of(t)`: where a token's key is kept.
    template <class SlotOf> void project(Team& team, const AttentionBlock& block, T* queries, SlotOf slot_of) const {
        stream.keep_product(team, block.kv_down, kept, kept_of(block));
        const bool has_low = block.query_down.columns != 0;
        if (has_low) stream.keep_product(team, block.query_down, low, rank_of(block));
        team.wait();
        const InnerRows<T, W> rows = normed.narrowed(block.query_down.columns);
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            keep(block, t, slot_of(t));
            if (has_low) normalize_low(block, t, rows);
        });
        team.wait();
        const int64_t dim = block.still_dim + block.turning();
        const float scale = float(block.scale * LOG2_E);
        const auto place = [&](int64_t column, int64_t row, int count, const float* c, int stride, int) {
            const int64_t head = column / dim;
            for (int r = 0; r < count; r++, c += stride) {
                T* parts = still.values + (row + r) * still.stride + head * block.still_dim;
                for (int64_t d = 0; d < block.still_dim; d += LANES) store16(parts + d, load16(c + d));
                turn(block, c + block.still_dim, stream.tokens[row + r].position, scale,
                     queries + ((row + r) * block.num_heads + head) * block.head_dim);
            }
        };
        if (has_low)
            stream.multiply(team, block.qkv, rows, int(dim / LANES), place);
        else
            stream.multiply(team, block.qkv, int(dim / LANES), place);
        team.wait();
        each_head(team, block.key_up, block.num_heads, still, block.still_dim,
                  [&](int64_t t, int64_t head, int64_t k, f32x16 x) {
                      store16(queries + (t * block.num_heads + head) * block.head_dim + block.turning() + k, x * scale);
                  });
        team.wait();
    }

    // What heads attend to [T][heads][head_dim], of which latent vectors come first -> the rows of their outputs.
    void expand(Team& team, const AttentionBlock& block, const Rows<T>& attended) const {
        const Rows<T> to = values_of(block).written;
        each_head(team, block.value_up, block.num_heads, attended, block.head_dim,
                  [&](int64_t t, int64_t head, int64_t k, f32x16 x) {
                      store16(to.values + t * to.stride + head * block.value_dim + k, x);
                  });
        team.wait();
    }

  private:
    static int64_t kept_of(const AttentionBlock& block) { return block.is_latent() ? pad(block.head_dim, LANES) : 0; }
    static int64_t rank_of(const AttentionBlock& block) { return pad(block.query_down.columns, LANES); }
    static int64_t still_of(const AttentionBlock& block) { return block.num_heads * block.still_dim; }
    static int64_t width_of(const AttentionBlock& block) { return block.num_heads * block.value_dim; }

    template <class Count> static int64_t most(const Sublayers& sublayers, Count count) {
        return sublayers.most(&Sublayer::attention, count);
    }

    void normalize_low(const AttentionBlock& block, int64_t t, const InnerRows<T, W>& rows) const {
        const int64_t rank = block.query_down.columns;
        const float *from = low + t * rank_of(block), *weight = block.query_down_norm, eps = float(block.latent_eps);
        if constexpr (Rows<W>::IS_QUANTIZED)
            if (is_plain<W>(block.qkv)) return normalize(from, weight, rank, eps, rows.written, t);
        normalize(from, weight, rank, eps, rows.multiplied, t);
    }

    // Writes a token's turning key and latent vector into its slot, and zeros behind them, which values end with.
    void keep(const AttentionBlock& block, int64_t t, T* to) const {
        const float* from = kept + t * kept_of(block);
        const int64_t latent = block.num_common, turning = block.turning();
        turn(block, from + latent, stream.tokens[t].position, 1.0f, to);
        const float factor = inverse_rms(from, latent, float(block.latent_eps));
        for (int64_t d = 0; d < latent; d += LANES)
            store16(to + turning + d, load16(from + d) * factor * load16(block.kv_norm + d));
        for (int64_t d = 0; d < turning; d += LANES) store16(to + block.head_dim + d, f32x16{});
    }

    // The elements of the first half, and those of the second, which rotate with them.
    static void turn(const AttentionBlock& block, const float* c, int64_t position, float scale, T* to) {
        const int64_t half = block.turning() / 2;
        const float* cosines = block.rope + position * block.turning();
        for (int64_t d = 0; d < half; d += LANES) {
            const f32x16 low = load16(c + d), high = load16(c + half + d);
            const f32x16 cosine = load16(cosines + d) * scale, sine = load16(cosines + half + d) * scale;
            store16(to + d, low * cosine - high * sine);
            store16(to + half + d, high * cosine + low * sine);
        }
    }

    // The product of each head's own matrix and part of a row, `part` elements apart: use(t, head, k, 16 elements from k).
    template <class Use>
    void each_head(Team& team, const Matrix& matrix, int64_t num_heads, const Rows<T>& rows, int64_t part, Use use) const {
        constexpr int STRIDE = UNIT_PANELS * LANES;
        const int64_t panels = matrix.columns / num_heads / LANES, units = (panels + UNIT_PANELS - 1) / UNIT_PANELS;
        team.share(num_heads * units, [&](int64_t task) {
            alignas(64) float c[ROWS_AT_ONCE * STRIDE];
            const int64_t head = task / units, panel = task % units * UNIT_PANELS;
            const int width = UNIT_PANELS < panels - panel ? UNIT_PANELS : int(panels - panel);
            Rows<T> own = rows;
            own.values += head * part;
            for (int64_t first = 0; first < stream.num_tokens; first += ROWS_AT_ONCE) {
                const int64_t left = stream.num_tokens - first;
                const int count = left < ROWS_AT_ONCE ? int(left) : ROWS_AT_ONCE;
                own.multiply_by(matrix, first, count, head * panels + panel, width, c, STRIDE, {});
                for (int r = 0; r < count; r++)
                    for (int k = 0; k < width * LANES; k += LANES)
                        use(first + r, head, panel * LANES + k, load16(c + r * STRIDE + k));
            }
        });
    }
};
