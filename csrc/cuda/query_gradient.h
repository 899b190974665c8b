// The kernels by query of attention's backward pass for Hopper (query_gradient.cu), before and after its main kernel
// (attention_hopper_backward.cu), and the buffers between the three.
#pragma once
#include <cuda_runtime.h>

#include "mask_tiles.h"

namespace fastattn::cuda {

constexpr int kQueries = 64;  // of a tile

// The problem with its buffers in the workspace. A head's tiles of queries have places, those of all sequences in a
// row.
struct QueryGradient : AttentionBackward {
  int columns, upper;    // the padded head size; the columns of a first half of dQ
  int group;             // heads of queries per head of keys
  int keys;              // of a tile
  int tiles_q, tiles_k;  // tiles of a head in the longest sequence
  int places;            // tiles of queries of a head in all sequences
  bool is_general;       // The statistics are in natural units, because a mask may be large.
  float fold;            // dropout's scale, which dS lacks; 1 if everything is dropped

  // (H, places, values(), kQueries): the shift of the exponent, delta / fold, if general 1 / row_sum. The shift is
  // row_max in natural units if general, else LSE in units of log(2). It is infinite for rows that see nothing.
  float* row_values;
  float* sums;  // (H, places, sums_of_tile()): dQ / (scale fold), in the order of the products' registers
  int* turns;   // (H, places): how many tiles of keys have added to a tile of dQ
  int* ticket;  // how many tiles of keys blocks have taken
  MaskTiles mask_tiles;

  // Set the buffers, given the members before them. Return the floats of the workspace.
  int64_t set(float* workspace) {
    group = (int)(num_heads / max(num_kv_heads, 1));
    tiles_q = (int)ceil_div(seqlen_q, kQueries), tiles_k = (int)ceil_div(seqlen_k, keys);
    places = (int)(cu_seq_q ? rows_q / kQueries + batch : batch * tiles_q);
    const int64_t tiles = places * num_heads;
    row_values = workspace;
    sums = row_values + tiles * values() * kQueries;
    turns = (int*)(sums + tiles * sums_of_tile());
    ticket = turns + tiles;
    mask_tiles = {};
    int* const lists = ticket + 1;
    const int64_t bytes = mask.data ? mask_tiles.set(*this, kQueries, keys, true, lists) : 0;
    return (float*)lists - workspace + ceil_div(bytes, (int64_t)sizeof(float));
  }

  // The tiles of queries, each of which has a block.
  FASTATTN_HOST_DEVICE int64_t blocks() const { return batch * num_heads * tiles_q; }
  FASTATTN_HOST_DEVICE int values() const { return is_general ? 3 : 2; }
  // A tile has two halves by columns. Each is followed by a sum per query: that of the rounded dS of half of the keys.
  FASTATTN_HOST_DEVICE int sums_of_tile() const { return kQueries * (columns + 2); }

  // The place of a sequence's first tile of queries.
  __device__ int first_place(int of_batch) const {
    return cu_seq_q ? (int)cu_seq_q[of_batch] / kQueries + of_batch : of_batch * tiles_q;
  }
};

// Write the values of each row, and set the turns and the ticket to 0.
void prepare_rows(const QueryGradient&, cudaStream_t);

// Write the gradient of the queries.
void finish_query_gradient(const QueryGradient&, cudaStream_t);

}  // namespace fastattn::cuda
