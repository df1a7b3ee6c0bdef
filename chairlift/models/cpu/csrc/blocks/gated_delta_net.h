// The block of a Gated DeltaNet: a matrix per head, which each token decays and corrects. See
// models/blocks/gated_delta_net.py for the formulas.
#pragma once

#include "../recurrence.h"

template <class T, class W> struct GatedDeltaNet {
    static constexpr int64_t STAGES = 6;  // at most, as the counters of a Team are counted

    const Stream<T, W>& stream;
    const StateRows& rows;
    const InnerRows<T, W> gated;
    float* const projected;  // [T][in.columns]: query, key, value, output gate
    float* const gates;      // [T][gate.columns, padded to 16]: beta, decay
    float* const ready;      // of all inputs, replayed ones as well: query, key, value, factor of decay, beta
    float* const heads;      // [T][heads]: outputs
    float* const scratch;    // [threads]: a matrix that takes tentative tokens in
    const int64_t scratch_size;

    // With memory for each such block of a piece.
    GatedDeltaNet(const Stream<T, W>& s, const StateRows& r, const Sublayers& sublayers, int num_threads, Arena& arena)
        : stream(s), rows(r), gated(arena, s.num_tokens, most(sublayers, num_values)),
          projected(arena.allocate<float>(s.num_tokens * most(sublayers, num_projected))),
          gates(arena.allocate<float>(s.num_tokens * most(sublayers, num_gates))),
          ready(arena.allocate<float>(r.num_inputs() * most(sublayers, num_ready))),
          heads(arena.allocate<float>(s.num_tokens * most(sublayers, num_values))),
          scratch(arena.allocate<float>(num_threads * most(sublayers, matrix_size))),
          scratch_size(most(sublayers, matrix_size)) {}

    static bool reads(const GatedDeltaNetBlock& block, bool plain) {
        return is_plain<W>(block.in) == plain || is_plain<W>(block.gate) == plain;
    }

    // Called in the stage before `run`.
    void begin(const GatedDeltaNetBlock& block, int64_t t) const { rows_of(block).clear_padding(t, num_values(block)); }

    void run(Team& team, const GatedDeltaNetBlock& block, const Target& target) const {
        const InnerRows<T, W> inner = rows_of(block);
        stream.keep_product(team, block.in, projected, num_projected(block));
        stream.keep_product(team, block.gate, gates, num_gates(block));
        team.wait();
        const int64_t num_rows = stream.batch.num_rows, pairs = block.num_key_heads, values = block.num_value_heads;
        const int64_t units = pairs + values + 1;
        team.share(num_rows * units, [&](int64_t task) {
            const RowState row = rows.at(task / units, block.place);
            const int64_t unit = task % units;
            if (unit < pairs)
                make_pair(block, row, unit);
            else if (unit < pairs + values)
                make_value(block, row, unit - pairs);
            else
                make_gates(block, row);
        });
        team.wait();
        team.share(num_rows * values, [&](int64_t task) {
            const RowState row = rows.at(task / values, block.place);
            run_head(block, row, task % values, scratch + team.rank * scratch_size, inner.written);
        });
        team.wait();
        stream.leave(team, block.out, inner, num_values(block), target);
    }

  private:
    template <class Size> static int64_t most(const Sublayers& sublayers, Size size) {
        return sublayers.most(&Sublayer::gated_delta_net, size);
    }

    static int64_t num_keys(const GatedDeltaNetBlock& block) { return block.num_key_heads * block.key_dim; }
    static int64_t num_values(const GatedDeltaNetBlock& block) { return block.num_value_heads * block.value_dim; }
    static int64_t num_mixed(const GatedDeltaNetBlock& block) { return 2 * num_keys(block) + num_values(block); }
    static int64_t num_projected(const GatedDeltaNetBlock& block) { return num_mixed(block) + num_values(block); }
    static int64_t num_gates(const GatedDeltaNetBlock& block) { return pad(2 * block.num_value_heads, LANES); }
    static int64_t num_ready(const GatedDeltaNetBlock& block) { return num_mixed(block) + num_gates(block); }
    static int64_t matrix_size(const GatedDeltaNetBlock& block) { return block.key_dim * block.value_dim; }

    InnerRows<T, W> rows_of(const GatedDeltaNetBlock& block) const { return gated.narrowed(num_values(block)); }

    Taps taps_of(const GatedDeltaNetBlock& block) const {
        return {block.taps, nullptr, block.num_taps, num_mixed(block)};
    }

    // Convolves and activates some features of a row's inputs, and puts them into `ready`.
    void convolve(const GatedDeltaNetBlock& block, const RowState& row, int64_t feature, int64_t width) const {
        const int64_t stride = num_projected(block), size = num_ready(block);
        for (int64_t k = feature; k < feature + width; k += LANES)
            convolve16(taps_of(block), row, projected + row.token * stride, stride, k, [&](int64_t i, f32x16 x) {
                store16(ready + (row.first + i) * size + k, silu16(x));
            });
    }

    // A query and its key, each of length 1; the query is scaled as well.
    void make_pair(const GatedDeltaNetBlock& block, const RowState& row, int64_t head) const {
        const int64_t dim = block.key_dim, size = num_ready(block);
        for (int64_t kind = 0; kind < 2; kind++) {
            const int64_t feature = kind * num_keys(block) + head * dim;
            convolve(block, row, feature, dim);
            for (int64_t i = 0; i < row.num_inputs(); i++) {
                float* own = ready + (row.first + i) * size + feature;
                f32x16 squares = splat(0.0f);
                for (int64_t d = 0; d < dim; d += LANES) squares = fma16(load16(own + d), load16(own + d), squares);
                const float length = __builtin_sqrtf(sum16(squares) + float(block.length_eps));
                const float scale = (kind ? 1.0f : 1.0f / __builtin_sqrtf(float(dim))) / length;
                for (int64_t d = 0; d < dim; d += LANES) store16(own + d, load16(own + d) * scale);
            }
        }
    }

    void make_value(const GatedDeltaNetBlock& block, const RowState& row, int64_t head) const {
        convolve(block, row, 2 * num_keys(block) + head * block.value_dim, block.value_dim);
    }

    // Of all heads. Those of beta come first, as their inputs do.
    void make_gates(const GatedDeltaNetBlock& block, const RowState& row) const {
        const int64_t count = block.num_value_heads, size = num_ready(block), stride = num_gates(block);
        const float* own = gates + row.token * stride;
        for (int64_t i = 0; i < row.num_inputs(); i++) {
            const int64_t t = i - row.num_replayed;
            const float* from = t < 0 ? row.pending + i * row.pending_stride + num_mixed(block) : own + t * stride;
            float* to = ready + (row.first + i) * size + num_mixed(block);
            for (int64_t head = 0; head < count; head++) {
                const float decay = from[count + head] + block.dt_bias[head];
                to[head] = first_lane(sigmoid16(splat(from[head])));
                to[count + head] = first_lane(exp2_16(softplus16(splat(decay)) * (block.rates[head] * LOG2_E)));
            }
        }
        for (int64_t i = 0; i < row.num_tentative; i++)
            std::memcpy(row.pending + i * row.pending_stride + num_mixed(block),
                        own + (row.num_new - row.num_tentative + i) * stride, 2 * count * sizeof(float));
    }

    // The matrix of a head through a row's inputs, and what the next product reads of its outputs.
    void run_head(const GatedDeltaNetBlock& block, const RowState& row, int64_t head, float* other,
                  const Rows<T>& written) const {
        const int64_t dim = block.value_dim, size = num_ready(block), stride = num_values(block);
        const int64_t key_head = block.has_tiled_heads ? head % block.num_key_heads
                                                       : head / (block.num_value_heads / block.num_key_heads);
        float* matrix = row.live + (block.num_taps - 1) * num_mixed(block) + head * matrix_size(block);
        const auto move = [&](float* now, int64_t column, int64_t width, int64_t i) {
            const float* input = ready + (row.first + i) * size;
            const float *query = input + key_head * block.key_dim, *key = query + num_keys(block);
            const float* value = input + 2 * num_keys(block) + head * dim + column;
            const float *beta = input + num_mixed(block) + head, *decay = beta + block.num_value_heads;
            const int64_t t = i - row.num_replayed;
            float* output = t < 0 ? nullptr : heads + (row.token + t) * stride + head * dim + column;
            const Arrival arrival{query, key, value, *decay, *beta, output};
            if (width == COLUMNS_AT_ONCE)
                advance<COLUMNS_AT_ONCE / LANES>(block, now, 0, arrival);
            else
                for (int64_t k = 0; k < width; k += LANES) advance<1>(block, now, k, arrival);
        };
        walk_matrix(row, matrix, block.key_dim, dim, other, move);
        for (int64_t t = row.token; t < row.token + row.num_new; t++) finish(block, t, head, written);
    }

    // One token, for one head: its value and output begin with the columns at hand. A replayed one has no output.
    struct Arrival {
        const float *query, *key, *value;
        float decay, beta;
        float* output;
    };

    // One token in some columns of a matrix S, from the first of them on: S becomes a S + k b (v - a S' k)', and the
    // output is S' q of that.
    template <int VECTORS>
    static void advance(const GatedDeltaNetBlock& block, float* columns, int64_t first, const Arrival& arrival) {
        const int64_t stride = block.value_dim;
        float* const matrix = columns + first;
        f32x16 answers[VECTORS], read[VECTORS];
        for (int v = 0; v < VECTORS; v++) answers[v] = read[v] = splat(0.0f);
        for (int64_t d = 0; d < block.key_dim; d++) {
            const f32x16 k = splat(arrival.key[d]);
            for (int v = 0; v < VECTORS; v++)
                answers[v] = fma16(load16(matrix + d * stride + v * LANES), k, answers[v]);
        }
        f32x16 corrections[VECTORS];
        for (int v = 0; v < VECTORS; v++) corrections[v] =
                (load16(arrival.value + first + v * LANES) - answers[v] * arrival.decay) * arrival.beta;
        for (int64_t d = 0; d < block.key_dim; d++) {
            const f32x16 k = splat(arrival.key[d]), q = splat(arrival.query[d]);
            for (int v = 0; v < VECTORS; v++) {
                float* element = matrix + d * stride + v * LANES;
                const f32x16 moved = fma16(k, corrections[v], load16(element) * arrival.decay);
                store16(element, moved);
                read[v] = fma16(moved, q, read[v]);
            }
        }
        if (arrival.output)
            for (int v = 0; v < VECTORS; v++) store16(arrival.output + first + v * LANES, read[v]);
    }

    // A head's output after its norm and gate.
    void finish(const GatedDeltaNetBlock& block, int64_t t, int64_t head, const Rows<T>& written) const {
        const int64_t dim = block.value_dim, at = head * dim;
        const float* output = heads + t * num_values(block) + at;
        const float* gate = projected + t * num_projected(block) + num_mixed(block) + at;
        const float scale = inverse_rms(output, dim, float(block.norm_eps));
        for (int64_t d = 0; d < dim; d += LANES)
            store16(written.values + t * written.stride + at + d,
                    load16(output + d) * scale * load16(block.norm + d) * silu16(load16(gate + d)));
    }
};
