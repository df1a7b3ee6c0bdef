// What attention to a chunk of keys works on.
#pragma once

#include "../product/product.h"
#include "softmax.h"

constexpr int MOST_QUERIES = 512;    // queries of a task: tokens times query heads of a key/value head
constexpr int QUERIES_AT_ONCE = 32;  // if there are many
constexpr int MOST_HEADS = 8;        // key/value heads of a task; more than one only with at most 16 queries

template <class T> struct AttentionScratch {
    typename Multiplied<T>::type* queries;  // by head, [16][head_dim], if they are few and not read in place: see prepare_few
    T* keys;        // panels of 16 keys, [CHUNK / 16][head_dim / Pack][16][Pack]
    T* values;      // panels of 16 elements: [heads * head_dim / 16][CHUNK / Pack][16][Pack]
    T* weights;     // few queries: by head, [16][CHUNK]; many: [QUERIES_AT_ONCE][CHUNK]
    float* scores;  // likewise, or by head, [CHUNK][16], where keys are rows
    SoftmaxState chunk[MOST_HEADS];   // of at most QUERIES_AT_ONCE
    SoftmaxState merged[MOST_HEADS];  // of all queries of the task
};

// The keys and values of a slot: some neighbouring heads of a layer, read in place.
template <class T> struct KvView {
    const T *keys, *values;  // of the first head
    int64_t stride;          // from token to token
    int num_heads, head_dim;
};

// The queries of a task to these heads, and the keys that they see.
template <class T> struct Queries {
    const T* data;  // of the first head: [count][head_dim]
    int count;
    int64_t head_stride;  // from one head's queries to the next's
    Mask mask;
    float cap;  // soft cap of scores; 0 for none
};

// Neighbouring keys of a sequence: at most CHUNK.
struct Chunk {
    int first, count;

    int depth() const { return int(pad(count, KEYS_PADDING)); }  // to which values are packed
};
