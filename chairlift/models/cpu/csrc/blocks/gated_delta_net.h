// The block of a Gated DeltaNet: a matrix per head, which each token decays and corrects. See
// models/blocks/gated_delta_net.py for the formulas.
#pragma once

#include "../recurrence.h"

template <class T, class W> struct GatedDeltaNet {
    static constexpr int64_t STAGES = 6;  // at most, as the counters of a Team are counted

    // From so many inputs on, columns are moved apart: lines a power of 2 apart would compete for few places of the
    // first-level cache. With fewer, whose matrix comes from memory, as many columns at a time as there are registers for
    // are read as one stream.
    static constexpr int64_t MANY_INPUTS = 4;
    static constexpr int VECTORS_APART = 2, VECTORS_IN_PLACE = sizeof(f32_register) == sizeof(f32x16) ? 8 : 4;

    const Stream<T, W>& stream;
    const StateRows& rows;
    const InnerRows<T, W> gated;
    float* const projected;  // [T][num_projected]: query, key, value, output gate
    float* const gates;      // [T][gate.columns, padded to 16]: beta, decay
    float* const ready;      // what heads read of all inputs, replayed ones as well: see `queries_of`
    float* const heads;      // [value heads][T][value_dim]: outputs
    float* const scratch;    // [threads]: the columns at hand
    const int64_t scratch_size, num_inputs;

    // With memory for each such block of a piece.
    GatedDeltaNet(const Stream<T, W>& s, const StateRows& r, const Sublayers& sublayers, int num_threads, Arena& arena)
        : stream(s), rows(r), gated(arena, s.num_tokens, most(sublayers, num_values)),
          projected(arena.allocate<float>(s.num_tokens * most(sublayers, num_projected))),
          gates(arena.allocate<float>(s.num_tokens * most(sublayers, num_gates))),
          ready(arena.allocate<float>(r.num_inputs() * most(sublayers, num_ready))),
          heads(arena.allocate<float>(s.num_tokens * most(sublayers, num_values))),
          scratch(arena.allocate<float>(num_threads * most(sublayers, columns_size))),
          scratch_size(most(sublayers, columns_size)), num_inputs(r.num_inputs()) {}

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
            const int64_t next = task + 1 < num_rows * values ? task + 1 : task;
            const float* next_matrix = matrix_of(block, rows.at(next / values, block.place), next % values);
            run_head(block, rows.at(task / values, block.place), task % values, next_matrix,
                     scratch + team.rank * scratch_size, inner.written);
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
    // With a vector that is left out: tokens a power of 2 apart would compete for few places of the caches.
    static int64_t num_projected(const GatedDeltaNetBlock& block) {
        return num_mixed(block) + num_values(block) + LANES;
    }
    static int64_t num_gates(const GatedDeltaNetBlock& block) { return pad(2 * block.num_value_heads, LANES); }
    static int64_t num_ready(const GatedDeltaNetBlock& block) { return num_mixed(block) + num_gates(block); }
    static int64_t columns_size(const GatedDeltaNetBlock& block) { return block.key_dim * VECTORS_APART * LANES; }

    // Each head reads its own part of `ready` as a stream, input by input: a query and its key [2][key_dim] for each key
    // head, then a value for each value head, then its beta and factor of decay.
    float* queries_of(const GatedDeltaNetBlock& block, int64_t key_head, int64_t input) const {
        return ready + (key_head * num_inputs + input) * 2 * block.key_dim;
    }
    float* value_of(const GatedDeltaNetBlock& block, int64_t head, int64_t input) const {
        return ready + 2 * num_keys(block) * num_inputs + (head * num_inputs + input) * block.value_dim;
    }
    float* gates_of(const GatedDeltaNetBlock& block, int64_t head, int64_t input) const {
        return ready + num_mixed(block) * num_inputs + (head * num_inputs + input) * 2;
    }
    float* output_of(const GatedDeltaNetBlock& block, int64_t head, int64_t t) const {
        return heads + (head * stream.num_tokens + t) * block.value_dim;
    }

    InnerRows<T, W> rows_of(const GatedDeltaNetBlock& block) const { return gated.narrowed(num_values(block)); }

    Taps taps_of(const GatedDeltaNetBlock& block) const {
        return {block.taps, nullptr, block.num_taps, num_mixed(block)};
    }

    // Convolves and activates some features of a row's inputs. `to`: of the first input; the next is `size` further.
    void convolve(const GatedDeltaNetBlock& block, const RowState& row, int64_t feature, int64_t width, float* to,
                  int64_t size) const {
        const int64_t stride = num_projected(block);
        for (int64_t k = 0; k < width; k += LANES)
            convolve16(taps_of(block), row, projected + row.token * stride, stride, feature + k,
                       [&](int64_t i, f32x16 x) { store16(to + i * size + k, silu16(x)); });
    }

    // A query and its key, each of length 1; the query is scaled as well.
    void make_pair(const GatedDeltaNetBlock& block, const RowState& row, int64_t head) const {
        const int64_t dim = block.key_dim, size = 2 * dim;
        for (int64_t kind = 0; kind < 2; kind++) {
            float* const to = queries_of(block, head, row.first) + kind * dim;
            convolve(block, row, kind * num_keys(block) + head * dim, dim, to, size);
            for (int64_t i = 0; i < row.num_inputs(); i++) {
                float* own = to + i * size;
                f32x16 squares = splat(0.0f);
                for (int64_t d = 0; d < dim; d += LANES) squares = fma16(load16(own + d), load16(own + d), squares);
                const float length = __builtin_sqrtf(sum16(squares) + float(block.length_eps));
                const float scale = (kind ? 1.0f : 1.0f / __builtin_sqrtf(float(dim))) / length;
                for (int64_t d = 0; d < dim; d += LANES) store16(own + d, load16(own + d) * scale);
            }
        }
    }

    void make_value(const GatedDeltaNetBlock& block, const RowState& row, int64_t head) const {
        const int64_t dim = block.value_dim;
        convolve(block, row, 2 * num_keys(block) + head * dim, dim, value_of(block, head, row.first), dim);
    }

    // Of all heads, sixteen at a time. Those of beta come first, as their inputs do.
    void make_gates(const GatedDeltaNetBlock& block, const RowState& row) const {
        const int64_t count = block.num_value_heads, stride = num_gates(block);
        const float* own = gates + row.token * stride;
        for (int64_t i = 0; i < row.num_inputs(); i++) {
            const int64_t t = i - row.num_replayed;
            const float* from = t < 0 ? row.pending + i * row.pending_stride + num_mixed(block) : own + t * stride;
            for (int64_t head = 0; head < count; head += LANES) make_gates_of(block, row, i, from, head);
        }
        for (int64_t i = 0; i < row.num_tentative; i++)
            std::memcpy(row.pending + i * row.pending_stride + num_mixed(block),
                        own + (row.num_new - row.num_tentative + i) * stride, 2 * count * sizeof(float));
    }

    // Of up to sixteen heads of one input, from `first` on. `from`: of all heads.
    void make_gates_of(const GatedDeltaNetBlock& block, const RowState& row, int64_t i, const float* from,
                       int64_t first) const {
        const int64_t heads = block.num_value_heads, left = heads - first, count = left < LANES ? left : LANES;
        float beta[LANES] = {}, decay[LANES] = {}, rates[LANES] = {}, bias[LANES] = {};
        std::memcpy(beta, from + first, count * sizeof(float));
        std::memcpy(decay, from + heads + first, count * sizeof(float));
        std::memcpy(rates, block.rates + first, count * sizeof(float));
        std::memcpy(bias, block.dt_bias + first, count * sizeof(float));
        store16(beta, sigmoid16(load16(beta)));
        store16(decay, exp2_16(softplus16(load16(decay) + load16(bias)) * (load16(rates) * LOG2_E)));
        for (int64_t k = 0; k < count; k++) {
            float* to = gates_of(block, first + k, row.first + i);
            to[0] = beta[k];
            to[1] = decay[k];
        }
    }

    // [key_dim][value_dim]
    static float* matrix_of(const GatedDeltaNetBlock& block, const RowState& row, int64_t head) {
        return row.live + (block.num_taps - 1) * num_mixed(block) + head * block.key_dim * block.value_dim;
    }

    // The matrix of a head through a row's inputs, and what the next product reads of its outputs. `next`: the matrix
    // that the thread goes on with.
    void run_head(const GatedDeltaNetBlock& block, const RowState& row, int64_t head, const float* next, float* own,
                  const Rows<T>& written) const {
        float* matrix = matrix_of(block, row, head);
        const auto run = [&](auto vectors, int64_t column, float* apart) {
            const Columns<vectors()> columns(row, matrix + column, block.key_dim, block.value_dim, apart);
            run_columns(block, row, head, column, columns, next + column);
        };
        if (row.num_inputs() >= MANY_INPUTS || row.num_tentative)
            for_columns<VECTORS_APART>(block.value_dim, [&](auto vectors, int64_t k) { run(vectors, k, own); });
        else
            for_columns<VECTORS_IN_PLACE>(block.value_dim, [&](auto vectors, int64_t k) { run(vectors, k, nullptr); });
        for (int64_t t = row.token; t < row.token + row.num_new; t++) finish(block, t, head, written);
    }

    template <int VECTORS>
    void run_columns(const GatedDeltaNetBlock& block, const RowState& row, int64_t head, int64_t column,
                     const Columns<VECTORS>& columns, const float* next) const {
        const int64_t key_head = block.has_tiled_heads ? head % block.num_key_heads
                                                       : head / (block.num_value_heads / block.num_key_heads);
        const float* query = queries_of(block, key_head, row.first);
        const float* value = value_of(block, head, row.first) + column;
        const float* gate = gates_of(block, head, row.first);
        f32x16 answers[VECTORS];
        ask(columns, query + block.key_dim, answers, next);
        columns.walk(row, [&](int64_t i) {
            f32x16 read[VECTORS];
            const Arrival arrival{query, query + block.key_dim, value, gate[0], gate[1]};
            if (i + 1 < row.num_inputs())
                advance<true>(columns, arrival, answers, read, next);
            else
                advance<false>(columns, arrival, answers, read, next);
            query += 2 * block.key_dim, value += block.value_dim, gate += 2;
            if (i < row.num_replayed) return;
            float* output = output_of(block, head, row.token + i - row.num_replayed) + column;
            for (int v = 0; v < VECTORS; v++) store16(output + v * LANES, read[v]);
        });
    }

    // One token, for one head, whose value begins with the columns at hand. The next token's query follows its key.
    struct Arrival {
        const float *query, *key, *value;
        float beta, decay;
    };

    // S' k of some columns of a matrix S. Half of the same columns of the next matrix are prefetched.
    template <int VECTORS>
    static void ask(const Columns<VECTORS>& columns, const float* key, f32x16 (&answers)[VECTORS], const float* next) {
        for (int v = 0; v < VECTORS; v++) answers[v] = splat(0.0f);
        for (int64_t d = 0; d < columns.height; d++) {
            columns.template fetch<0, VECTORS / 2>(next, d);
            for (int v = 0; v < VECTORS; v++)
                answers[v] = fma16(load16(columns.at(d, v)), splat(key[d]), answers[v]);
        }
    }

    // One token in some columns of a matrix S, whose answers are S' k: S becomes a S + k b (v - a S' k)'. `read`: S' q of
    // that; and the answers become S' k of the next token's key, if there is one, so that S is read once a token. With
    // the last token the other half of the next matrix is prefetched.
    template <bool HAS_NEXT, int VECTORS>
    static void advance(const Columns<VECTORS>& columns, const Arrival& arrival, f32x16 (&answers)[VECTORS],
                        f32x16 (&read)[VECTORS], const float* next) {
        const int64_t dim = columns.height;
        const float* next_key = arrival.key + 2 * dim;
        f32x16 corrections[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            corrections[v] = (load16(arrival.value + v * LANES) - answers[v] * arrival.decay) * arrival.beta;
            answers[v] = read[v] = splat(0.0f);
        }
        for (int64_t d = 0; d < dim; d++) {
            const f32x16 k = splat(arrival.key[d]), q = splat(arrival.query[d]);
            const f32x16 asked = splat(HAS_NEXT ? next_key[d] : 0.0f);
            if constexpr (!HAS_NEXT) columns.template fetch<VECTORS / 2, VECTORS>(next, d);
            for (int v = 0; v < VECTORS; v++) {
                float* element = columns.at(d, v);
                const f32x16 moved = fma16(k, corrections[v], load16(element) * arrival.decay);
                store16(element, moved);
                read[v] = fma16(moved, q, read[v]);
                if constexpr (HAS_NEXT) answers[v] = fma16(moved, asked, answers[v]);
            }
        }
    }

    // A head's output after its norm and gate.
    void finish(const GatedDeltaNetBlock& block, int64_t t, int64_t head, const Rows<T>& written) const {
        const int64_t dim = block.value_dim, at = head * dim;
        const float* output = output_of(block, head, t);
        const float* gate = projected + t * num_projected(block) + num_mixed(block) + at;
        const float scale = inverse_rms(output, dim, float(block.norm_eps));
        for (int64_t d = 0; d < dim; d += LANES)
            store16(written.values + t * written.stride + at + d,
                    load16(output + d) * scale * load16(block.norm + d) * silu16(load16(gate + d)));
    }
};
