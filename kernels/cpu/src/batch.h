// Input arrays of one step, which Python fills before each run.
#pragma once

#include <cstdint>

namespace remora {

// T tokens of S sequences, sequence after sequence; R rows of logits.
struct Batch {
  int num_tokens, num_sequences, num_logits;
  const int64_t* token_ids;    // [T]
  const int64_t* positions;    // [T] from the start of each sequence
  const int64_t* slots;        // [T] page * page_size + offset, slot of the token's K and V
  const int32_t* starts;       // [S + 1] first token of each sequence
  const int32_t* lengths;      // [S] tokens of context, including this step's
  const int32_t* table_rows;   // [S] row of the page table
  const int32_t* tables;       // [rows][table_stride] page ids
  int64_t table_stride;
  const int64_t* window_slots;   // both for windowed layers with page tables of their own
  const int32_t* window_tables;
  const int32_t* logit_index;  // [R] tokens whose logits are computed
  const int32_t* adapters;     // [T] slot of each token's adapter, counted from 1; 0 = none
};

}  // namespace remora
