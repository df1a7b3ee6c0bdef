// A piece of a decoder's forward pass in one parallel region: see models/decoder.py for the same in torch, operator by
// operator. All sublayers and both ends are a piece, too.
//
// The code of a kind of block (blocks/) is constructed once per piece, with memory for the largest of its blocks, and
// has STAGES; `prepare`, if there is anything to do before the threads start; `reads`, which tells in which formats its
// products read the stream; `begin`, its work on a token while the stream's rows are made; and `run`.
#pragma once

#include "blocks/attention.h"
#include "blocks/dense_mlp.h"
#include "blocks/experts.h"
#include "blocks/gated_delta_net.h"
#include "blocks/gated_short_conv.h"
#include "blocks/mamba2.h"

template <class T, class W> struct Forward {
    const Piece& piece;
    const Sublayers sublayers;
    const Stream<T, W> stream;
    const Attention<T, W> attention;
    const DenseMlp<T, W> dense_mlp;
    const Experts<T, W> experts;
    const StateRows state_rows;
    const GatedShortConv<T, W> gated_short_conv;
    const GatedDeltaNet<T, W> gated_delta_net;
    const Mamba2<T, W> mamba2;
    const int64_t num_counters;
    Counter* const counters;

    Forward(const Model& model, const Batch& batch, const Piece& p, Arena& arena, int num_threads)
        : piece(p), sublayers(model, p), stream(model, batch, p.residual, has_post_norms(), has_plain(), arena),
          attention(stream, sublayers, num_threads, arena), dense_mlp(stream, sublayers, arena),
          experts(stream, sublayers, arena), state_rows(batch, has_states(), arena), gated_short_conv(stream, state_rows, sublayers, arena),
          gated_delta_net(stream, state_rows, sublayers, num_threads, arena),
          mamba2(stream, state_rows, sublayers, num_threads, arena), num_counters(num_stages() * num_threads),
          counters(arena.allocate<Counter>(num_counters)) {}

    // Called before the threads start.
    void prepare() const {
        std::memset((void*)counters, 0, sizeof(Counter) * num_counters);
        stream.prepare();
        attention.prepare();
        if (has_states()) state_rows.prepare();
    }

    void run(Team team) const {
        if (piece.is_first) {
            team.share_rows(stream.num_tokens, [&](int64_t t) { stream.embed(t); });
            team.wait();
        }
        const float* after = nullptr;  // the norm of what the last sublayer adds, which goes with the next stage
        for (const Sublayer& each : sublayers) {
            run_sublayer(team, each, after);
            after = each.post_norm;
        }
        if (!after && !piece.hidden) return;
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            if (after) stream.add_normalized(t, after);
            if (piece.hidden) stream.finish(t, static_cast<T*>(piece.hidden) + t * stream.model.hidden);
        });
    }

  private:
    // Calls `use(code, block)` with each block of a sublayer, and the code of its kind.
    template <class Use> void each_block(const Sublayer& sublayer, Use use) const {
        if (sublayer.attention) use(attention, *sublayer.attention);
        if (sublayer.dense_mlp) use(dense_mlp, *sublayer.dense_mlp);
        if (sublayer.experts) use(experts, *sublayer.experts);
        if (sublayer.gated_short_conv) use(gated_short_conv, *sublayer.gated_short_conv);
        if (sublayer.gated_delta_net) use(gated_delta_net, *sublayer.gated_delta_net);
        if (sublayer.mamba2) use(mamba2, *sublayer.mamba2);
    }

    int64_t num_stages() const {
        int64_t sum = 2;  // the embedding and the end
        for (const Sublayer& each : sublayers) {
            sum++;
            each_block(each, [&](const auto& code, const auto&) { sum += code.STAGES; });
        }
        return sum;
    }

    bool has_post_norms() const {
        return sublayers.any([](const Sublayer& each) { return each.post_norm != nullptr; });
    }

    bool has_states() const {
        return sublayers.any([](const Sublayer& each) { return each.has_state(); });
    }

    bool has_plain() const {
        return sublayers.any([&](const Sublayer& each) { return reads(each, true); });
    }

    // Whether products of it read rows that are not quantized although others are, or those others.
    bool reads(const Sublayer& sublayer, bool plain) const {
        bool is_read = false;
        each_block(sublayer, [&](const auto& code, const auto& block) { is_read |= code.reads(block, plain); });
        return is_read;
    }

    void run_sublayer(Team& team, const Sublayer& sublayer, const float* after) const {
        const bool is_rounded_read = reads(sublayer, false), is_plain_read = reads(sublayer, true);
        team.share_rows(stream.num_tokens, [&](int64_t t) {
            if (after) stream.add_normalized(t, after);
            stream.enter(t, sublayer.pre_norm, is_rounded_read, is_plain_read);
            each_block(sublayer, [&](const auto& code, const auto& block) { code.begin(block, t); });
        });
        team.wait();
        Target target = stream.first_target(sublayer.post_norm != nullptr);
        each_block(sublayer, [&](const auto& code, const auto& block) {
            code.run(team, block, target);
            target.is_sum = true;  // of the blocks that follow side by side
        });
    }
};
