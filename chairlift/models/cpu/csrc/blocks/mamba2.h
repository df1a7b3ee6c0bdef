// The block of Mamba 2: a matrix per head, which tokens decay and add to. See models/blocks/mamba2.py for the formulas.
// A matrix has a row for each element of B and C, so that its columns, those of the head, stand side by side in vectors.
#pragma once

#include "../recurrence.h"

template <class T, class W> struct Mamba2 {
    static constexpr int64_t STAGES = 6;  // at most, as the counters of a Team are counted
    static constexpr int VECTORS = 4;  // of a head's columns at a time, whose sums stay in registers
    static constexpr int64_t CONVOLVED = 128;  // features that a thread convolves at a time

    const Stream<T, W>& stream;
    const StateRows& rows;
    const InnerRows<T, W> gated;
    float* const projected;  // [T][in.columns, padded to 16]: output gate, x, B, C, dt
    float* const ready;      // of all inputs, replayed ones as well: x, B, C, dt, factor of decay
    float* const heads;      // [T][features]: outputs
    float* const scratch;    // [threads]: the columns at hand
    const int64_t scratch_size;

    // With memory for each such block of a piece.
    Mamba2(const Stream<T, W>& s, const StateRows& r, const Sublayers& sublayers, int num_threads, Arena& arena)
        : stream(s), rows(r), gated(arena, s.num_tokens, most(sublayers, num_features)),
          projected(arena.allocate<float>(s.num_tokens * most(sublayers, num_projected))),
          ready(arena.allocate<float>(r.num_inputs() * most(sublayers, num_ready))),
          heads(arena.allocate<float>(s.num_tokens * most(sublayers, num_features))),
          scratch(arena.allocate<float>(num_threads * most(sublayers, columns_size))),
          scratch_size(most(sublayers, columns_size)) {}

    static bool reads(const Mamba2Block& block, bool plain) { return is_plain<W>(block.in) == plain; }

    // Called in the stage before `run`.
    void begin(const Mamba2Block& block, int64_t t) const { rows_of(block).clear_padding(t, num_features(block)); }

    void run(Team& team, const Mamba2Block& block, const Target& target) const {
        const InnerRows<T, W> inner = rows_of(block);
        stream.keep_product(team, block.in, projected, num_projected(block), block.factors);
        team.wait();
        const int64_t num_rows = stream.batch.num_rows, num_heads = block.num_heads, groups = block.num_groups;
        const int64_t parts = (num_mixed(block) + CONVOLVED - 1) / CONVOLVED;
        const int64_t units = parts + padded_heads(block) / LANES;
        team.share(num_rows * units, [&](int64_t task) {
            const RowState row = rows.at(task / units, block.place);
            const int64_t unit = task % units;
            if (unit < parts)
                convolve(block, row, unit * CONVOLVED);
            else
                make_steps(block, row, (unit - parts) * LANES);
        });
        team.wait();
        team.share(num_rows * num_heads, [&](int64_t task) {
            const RowState row = rows.at(task / num_heads, block.place);
            run_head(block, row, task % num_heads, scratch + team.rank * scratch_size);
        });
        team.wait();
        team.share(stream.num_tokens * groups,
                   [&](int64_t task) { finish(block, task / groups, task % groups, inner.written); });
        team.wait();
        stream.leave(team, block.out, inner, num_features(block), target.times(block.output_scale));
    }

  private:
    template <class Size> static int64_t most(const Sublayers& sublayers, Size size) {
        return sublayers.most(&Sublayer::mamba2, size);
    }

    static int64_t num_features(const Mamba2Block& block) { return block.num_heads * block.head_dim; }
    static int64_t num_shared(const Mamba2Block& block) { return block.num_groups * block.state_size; }
    static int64_t num_mixed(const Mamba2Block& block) { return num_features(block) + 2 * num_shared(block); }
    static int64_t padded_heads(const Mamba2Block& block) { return pad(block.num_heads, LANES); }
    static int64_t num_projected(const Mamba2Block& block) {
        return num_features(block) + num_mixed(block) + padded_heads(block);
    }
    static int64_t num_ready(const Mamba2Block& block) { return num_mixed(block) + 2 * padded_heads(block); }
    static int64_t columns_size(const Mamba2Block& block) { return block.state_size * VECTORS * LANES; }

    InnerRows<T, W> rows_of(const Mamba2Block& block) const { return gated.narrowed(num_features(block)); }

    // The inputs of a row's new tokens: x, B, C, dt.
    const float* inputs_of(const Mamba2Block& block, const RowState& row) const {
        return projected + row.token * num_projected(block) + num_features(block);
    }

    // Convolves and activates some features of a row's inputs, and puts them into `ready`.
    void convolve(const Mamba2Block& block, const RowState& row, int64_t first) const {
        const int64_t stride = num_projected(block), size = num_ready(block), mixed = num_mixed(block);
        const Taps taps{block.taps, block.conv_bias, block.num_taps, mixed};
        for (int64_t k = first; k < first + CONVOLVED && k < mixed; k += LANES)
            convolve16(taps, row, inputs_of(block, row), stride, k, [&](int64_t i, f32x16 x) {
                store16(ready + (row.first + i) * size + k, silu16(x));
            });
    }

    // dt and the factor of decay, of sixteen heads.
    void make_steps(const Mamba2Block& block, const RowState& row, int64_t head) const {
        const int64_t mixed = num_mixed(block), size = num_ready(block), stride = num_projected(block);
        const int64_t left = block.num_heads - head, count = left < LANES ? left : LANES;
        const float* own = inputs_of(block, row) + mixed + head;
        float* pending = row.pending + mixed + head;
        const f32x16 bias = load16(block.dt_bias + head), rates = load16(block.rates + head) * LOG2_E;
        const f32x16 least = splat(float(block.least_dt)), most = splat(float(block.most_dt));
        for (int64_t i = 0; i < row.num_inputs(); i++) {
            const int64_t t = i - row.num_replayed;
            float raw[LANES] = {};
            std::memcpy(raw, t < 0 ? pending + i * row.pending_stride : own + t * stride, count * sizeof(float));
            f32x16 dt = softplus16(load16(raw) + bias);
            dt = select(dt < least, least, select(dt > most, most, dt));
            float* to = ready + (row.first + i) * size + mixed + head;
            store16(to, dt);
            store16(to + padded_heads(block), exp2_16(dt * rates));
        }
        for (int64_t i = 0; i < row.num_tentative; i++)
            std::memcpy(pending + i * row.pending_stride, own + (row.num_new - row.num_tentative + i) * stride,
                        count * sizeof(float));
    }

    // The matrix of a head through a row's inputs.
    void run_head(const Mamba2Block& block, const RowState& row, int64_t head, float* own) const {
        const int64_t size = block.state_size * block.head_dim;
        float* matrix = row.live + (block.num_taps - 1) * num_mixed(block) + head * size;
        for_columns<VECTORS>(block.head_dim, [&](auto vectors, int64_t column) {
            float* const apart = row.num_tentative ? own : nullptr;
            const Columns<vectors()> columns(row, matrix + column, block.state_size, block.head_dim, apart);
            run_columns(block, row, head, column, columns);
        });
    }

    template <int COUNT>
    void run_columns(const Mamba2Block& block, const RowState& row, int64_t head, int64_t column,
                     const Columns<COUNT>& columns) const {
        const int64_t dim = block.head_dim, size = num_ready(block), features = num_features(block);
        const int64_t group = head / (block.num_heads / block.num_groups);
        columns.walk(row, [&](int64_t i) {
            const float *input = ready + (row.first + i) * size, *dt = input + num_mixed(block) + head;
            const float *entering = input + features + group * block.state_size, *x = input + head * dim + column;
            const int64_t t = i - row.num_replayed;
            float* output = t < 0 ? nullptr : heads + (row.token + t) * features + head * dim + column;
            advance(columns, {x, entering, entering + num_shared(block), *dt, dt[padded_heads(block)],
                              block.skips[head], output});
        });
    }

    // One token, for one head: x and the output begin with the columns at hand. A replayed one has no output.
    struct Arrival {
        const float *x, *entering, *leaving;  // entering: B; leaving: C
        float dt, decay, skip;
        float* output;
    };

    // One token in some columns of a matrix S: S becomes a S + B (dt x)', and the output is S' C of that, and D x.
    template <int COUNT> static void advance(const Columns<COUNT>& columns, const Arrival& arrival) {
        f32x16 added[COUNT], read[COUNT];
        for (int v = 0; v < COUNT; v++) {
            added[v] = load16(arrival.x + v * LANES) * arrival.dt;
            read[v] = splat(0.0f);
        }
        for (int64_t n = 0; n < columns.height; n++) {
            const f32x16 b = splat(arrival.entering[n]), c = splat(arrival.leaving[n]);
            for (int v = 0; v < COUNT; v++) {
                float* element = columns.at(n, v);
                const f32x16 moved = fma16(b, added[v], load16(element) * arrival.decay);
                store16(element, moved);
                read[v] = fma16(moved, c, read[v]);
            }
        }
        if (!arrival.output) return;
        for (int v = 0; v < COUNT; v++)
            store16(arrival.output + v * LANES,
                    fma16(load16(arrival.x + v * LANES), splat(arrival.skip), read[v]));
    }

    // The output of a group of heads after its gate and norm, in their order.
    void finish(const Mamba2Block& block, int64_t t, int64_t group, const Rows<T>& written) const {
        const int64_t width = num_features(block) / block.num_groups, at = group * width;
        float* output = heads + t * num_features(block) + at;
        const float* gate = projected + t * num_projected(block) + at;
        T* to = written.values + t * written.stride + at;
        if (!block.is_gated_last)
            for (int64_t k = 0; k < width; k += LANES)
                store16(output + k, load16(output + k) * silu16(load16(gate + k)));
        const float scale = block.norm ? inverse_rms(output, width, float(block.norm_eps)) : 1.0f;
        for (int64_t k = 0; k < width; k += LANES) {
            f32x16 x = load16(output + k) * scale;
            if (block.norm) x = x * load16(block.norm + at + k);
            store16(to + k, block.is_gated_last ? x * silu16(load16(gate + k)) : x);
        }
    }
};
