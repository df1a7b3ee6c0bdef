// The library's entries: a forward pass, the logits of some of its rows, and what brings weights into their layout.
//
//     model.h       what Python passes
//     vector/       sixteen lanes on every instruction set, number formats, arithmetic
//     product/      the product of float32 and bfloat16: panels, registers, tiles of AMX
//     grouped/      the product of integers in groups, with a file for each instruction set
//     rows.h        activations as the next product multiplies them
//     team.h        threads, and how they share work; memory.h: the memory that they work in
//     linear.h      a product with weights, shared among threads
//     stream.h      the residual stream, of which blocks read and to which they add
//     attention/    attention over slots: how it is cut into tasks, and what a task does
//     blocks/       the kinds of blocks, a file for each
//     forward.h     the sublayers one after the other
//     loading/      blocks of GGUF files, and rows that become panels

#include "forward.h"
#include "loading/blocks.h"
#include "loading/panels.h"

namespace {

// Runs `body(team)` on that many threads, whose stages have so many counters together. They wait for each other before
// they end: OpenMP's threads would do that at the end of its region, and spin for milliseconds on a core that the thread
// they wait for may need.
template <class Body> void in_parallel(int num_threads, Counter* counters, int64_t num_counters, Body body) {
    Barrier barrier;
    on_threads(num_threads, [&](int rank, int size) {
        forget_tiles();
        body(Team{rank, size, counters, barrier, counters + num_counters});
        leave_tiles();
        forget_panels();
        barrier.wait(size);
    });
}

template <class T, class W>
int64_t forward(const Model& model, const Batch& batch, const Piece& piece, void* workspace, int num_threads) {
    Arena arena{static_cast<char*>(workspace)};
    Forward<T, W> pass(model, batch, piece, arena, num_threads);
    CHECK(!workspace || arena.used == (forward<T, W>(model, batch, piece, nullptr, num_threads)));
    if (workspace) {
        for (int64_t t = 0; piece.is_first && t < batch.num_tokens; t++)
            if (batch.input_ids[t] < 0 || batch.input_ids[t] >= model.vocab) return -1;
        pass.prepare();
        in_parallel(num_threads, pass.counters, pass.num_counters, [&](Team team) { pass.run(team); });
    }
    return arena.used;
}

void finish_logits(const Model& model, float* c, int width) {
    const float scale = float(model.logits_scale), cap = float(model.logits_softcap);
    for (int k = 0; k < width; k += LANES) {
        const f32x16 scaled = load16(c + k) * scale;
        store16(c + k, cap != 0 ? cap16(scaled, cap) : scaled);
    }
}

constexpr int64_t LOGITS_STAGES = 4;  // at least as many as there are

template <class T, class W>
int64_t logits(const Model& model, const void* hidden, int64_t num_rows, float* out, void* workspace, int num_threads) {
    Arena arena{static_cast<char*>(workspace)};
    Rows<W> rows(arena, num_rows, model.hidden);
    const int64_t padded = pad(model.hidden, LANES);
    T* own = arena.allocate<T>(num_rows * padded);
    const int64_t num_counters = LOGITS_STAGES * num_threads;
    Counter* counters = arena.allocate<Counter>(num_counters);
    if (!workspace) return arena.used;
    std::memset((void*)counters, 0, sizeof(Counter) * num_counters);
    in_parallel(num_threads, counters, num_counters, [&](Team team) {
        team.share_rows(num_rows, [&](int64_t row) {
            std::memset((void*)(own + row * padded), 0, padded * sizeof(T));
            std::memcpy((void*)(own + row * padded), static_cast<const T*>(hidden) + row * model.hidden,
                        model.hidden * sizeof(T));
            convert_row(own + row * padded, padded, rows, row);
        });
        team.wait();
        linear(team, model.head, rows, num_rows, UNIT_PANELS,
               [&](int64_t column, int64_t row, int count, float* c, int stride, int width) {
                   const int64_t left = model.vocab - column;
                   const int64_t n = width < left ? width : left;
                   if (model.logits_scale != 1 || model.logits_softcap != 0)
                       for (int r = 0; r < count; r++) finish_logits(model, c + r * stride, width);
                   for (int r = 0; r < count; r++)
                       std::memcpy(out + (row + r) * model.vocab + column, c + r * stride, n * sizeof(float));
               });
    });
    return arena.used;
}

}  // namespace

// Number formats of model and weights: 0 float32, 1 bfloat16, 2 float32 with weights in groups, 3 bfloat16 likewise.
#define CHAIRLIFT_FOR_FORMAT(format, function, ...)                            \
    switch (format) {                                                          \
        case 0: return function<float, float>(__VA_ARGS__);                    \
        case 1: return function<bf16, bf16>(__VA_ARGS__);                      \
        case 2: return function<float, Group>(__VA_ARGS__);                   \
        default: return function<bf16, FactorOfGroups>(__VA_ARGS__);          \
    }

// Called by Python; the compiler is told to hide all else.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// 0 if this machine lets the library run. `sizes`: bytes of the structures, which must be those that Python passes.
EXPORTED int chairlift_start(int64_t* sizes) {
    const int64_t own[] = {
        sizeof(Matrix), sizeof(AttentionBlock), sizeof(DenseMlpBlock), sizeof(ExpertsBlock), sizeof(GatedShortConvBlock),
        sizeof(GatedDeltaNetBlock), sizeof(Mamba2Block), sizeof(PerLayerInputBlock), sizeof(LaurelBlock),
        sizeof(AltUpBlock), sizeof(Sublayer), sizeof(LayerInputs), sizeof(Streams), sizeof(Model),
        sizeof(CacheGroup), sizeof(States), sizeof(Batch), sizeof(Piece)};
    std::memcpy(sizes, own, sizeof own);
    return enable_tiles() ? 0 : 1;
}

// Both return the bytes of workspace they need, and compute only if there is one; -1 if the vocabulary lacks a token.
EXPORTED int64_t chairlift_forward(const Model* model, const Batch* batch, const Piece* piece, int format,
                                   void* workspace, int num_threads) {
    CHAIRLIFT_FOR_FORMAT(format, forward, *model, *batch, *piece, workspace, num_threads)
}

EXPORTED int64_t chairlift_logits(const Model* model, const void* hidden, int64_t num_rows, int format, float* out,
                                  void* workspace, int num_threads) {
    CHAIRLIFT_FOR_FORMAT(format, logits, *model, hidden, num_rows, out, workspace, num_threads)
}

// `change`: 0 words stay as they are, 1 signed bytes become unsigned ones, 2 halves of bytes are folded.
EXPORTED void chairlift_write_panels(const uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride,
                                     int change, uint32_t* to) {
    switch (change) {
        case 0: return write_panels(rows, num_rows, num_words, stride, to, AsTheyAre());
        case 1: return write_panels(rows, num_rows, num_words, stride, to, AroundZero());
        default: return write_panels(rows, num_rows, num_words, stride, to, FoldedHalves());
    }
}

// 1 if blocks of the type, which has that number in GGUF files, were unpacked; 0 if it is unknown here.
EXPORTED int chairlift_unpack_blocks(int kind, const uint8_t* blocks, int64_t count, uint8_t* values, void* scales,
                                     void* offsets, uint16_t* scale_steps, uint16_t* offset_steps) {
    return unpack_blocks(kind, blocks, count, {values, scales, offsets, scale_steps, offset_steps});
}
