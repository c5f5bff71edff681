// The library's C interface for Python: plain functions over pointers, without computation.
#include <exception>

#include "experts.h"
#include "latents.h"
#include "program.h"

using namespace remora;

namespace {

class Packing : public Job {
 public:
  Packing(const Weight& weight, const void* from, Format source, bool gated, bool spent)
      : weight_(weight), from_(from), source_(source), gated_(gated), spent_(spent) {}
  int num_stages() const override { return 1; }
  int num_chunks(int) const override { return weight_.num_panels; }
  void run_chunk(int, int panel, int) override {
    char* to = const_cast<char*>(weight_.data) + panel * panel_bytes(weight_.format, weight_.k);
    pack_panel(weight_.format, from_, source_, weight_.n, weight_.k, gated_, panel, to);
    if (spent_) give_back_panel(from_, source_, weight_.n, weight_.k, gated_, panel);
  }

 private:
  const Weight& weight_;
  const void* from_;
  const Format source_;
  const bool gated_, spent_;
};

template <class T, class... Values>
void add(void* program, Values&&... values) {
  ((Program*)program)->add(std::make_unique<T>(std::forward<Values>(values)...));
}

const AdapterRows& adapter_rows(void* program, bool on_logits) {
  return ((Program*)program)->adapter_rows(on_logits);
}

void set_sizes(Batch& batch, int num_tokens, int num_sequences, int num_logits) {
  batch.num_tokens = num_tokens;
  batch.num_sequences = num_sequences;
  batch.num_logits = num_logits;
}

}  // namespace

extern "C" {

// The target of the compilation, and the sizes of structures that Python mirrors.
const char* remora_instruction_set() {
#if REMORA_TILES == 1
  return "AVX-512 with AMX";
#elif REMORA_TILES == 2
  return "emulated tiles";
#elif defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  return "AVX-512 with BF16 and VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
  return "NEON with BF16 and I8MM";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON with dot products";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "portable";
#endif
}

// Whether the system lets this process use the tile registers of this library; asked before use.
int remora_may_use_tiles() {
#if REMORA_TILES
  return may_use_tiles();
#else
  return true;
#endif
}

int remora_struct_size(int number) {
  const size_t sizes[] = {sizeof(Batch),   sizeof(Weight),    sizeof(Rows),
                          sizeof(Output),  sizeof(KvCache),   sizeof(Attention),
                          sizeof(RotateAndStore::Settings), sizeof(LowRank),
                          sizeof(NormWeights), sizeof(Routing), sizeof(Choices),
                          sizeof(AddWeighted::Settings), sizeof(MultiplyHeads::Settings),
                          sizeof(JoinLatents::Settings), sizeof(JoinHeads::Settings)};
  return (int)sizes[number];
}

// Whether packed weights have the layout for tile registers.
bool remora_has_tiles() { return HAS_TILES; }
// Whether int8 K and V of bf16 caches are in fours, W of attention.h.
bool remora_has_byte_products() { return HAS_BYTE_PRODUCTS; }
int remora_padded_k(int format, int k) { return padded_k((Format)format, k); }
int64_t remora_panel_bytes(int format, int k) { return panel_bytes((Format)format, k); }
int remora_group_size(int format) { return group_size((Format)format); }
int64_t remora_page_bytes(const KvCache* cache) { return cache->page_bytes(); }

// Null if the system refuses threads or memory.
void* remora_team_new(int num_threads) {
  try {
    return new Team(num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}
void remora_team_free(void* team) { delete (Team*)team; }

// source: format of `from`; spent: `from` has no reader afterwards
void remora_pack(void* team, const Weight* weight, const void* from, int source, int gated,
                 int spent) {
  Packing job(*weight, from, (Format)source, gated, spent);
  ((Team*)team)->run(job);
}

void* remora_program_new(void* team, const Batch* batch) {
  auto* program = new Program(*(Team*)team);
  program->batch = *batch;
  return program;
}
void remora_program_free(void* program) { delete (Program*)program; }

void remora_add_embed(void* program, const void* table, int format, int size, int by_position,
                      float* stream, int stride) {
  add<Embed>(program, table, (Format)format, size, by_position, stream, stride);
}
void remora_add_norm(void* program, int on_logits, const float* x, int stride,
                     const NormWeights* weights, int format, const Rows* out, int adds) {
  add<Norm>(program, on_logits, x, stride, *weights, (Format)format, *out, adds);
}
void remora_add_round(void* program, int on_logits, int rows_per_token, const float* x, int stride,
                      int size, int format, const Rows* out) {
  add<Round>(program, on_logits, rows_per_token, x, stride, size, (Format)format, *out);
}
void remora_add_shrink(void* program, int on_logits, const LowRank* low, const void* x,
                       int x_is_bf16, int stride) {
  add<Shrink>(program, adapter_rows(program, on_logits), *low, x, x_is_bf16, stride);
}
void remora_add_update_embedded(void* program, const LowRank* low, float* stream, int stride) {
  add<UpdateEmbedded>(program, adapter_rows(program, false), *low, stream, stride);
}
void remora_add_rotate_and_store(void* program, const RotateAndStore::Settings* settings) {
  add<RotateAndStore>(program, *settings);
}
void remora_add_attend(void* program, const Attention* attention) {
  auto* to = (Program*)program;
  add<Attend>(program, *attention, to->partition_sums(), to->kv_groups());
}
// low: null = the weight has no updates
void remora_add_multiply(void* program, int on_logits, const Weight* weight, const Rows* x,
                         const Output* out, const LowRank* low) {
  add<Multiply>(program, on_logits, *weight, *x, *out, adapter_rows(program, on_logits), low);
}
void remora_add_route(void* program, const Routing* routing, const float* logits, int stride,
                      const Choices* out) {
  add<Route>(program, *routing, logits, stride, *out);
}
void remora_add_sort_pairs(void* program, const Choices* choices) {
  add<SortPairs>(program, *choices);
}
void remora_add_gather(void* program, int format, const Rows* x, const Rows* out,
                       const Choices* choices) {
  add<Gather>(program, (Format)format, *x, *out, *choices);
}
void remora_add_weigh(void* program, const float* x, int stride, int size, int format,
                      const Rows* out, const Choices* choices) {
  add<Weigh>(program, x, stride, size, (Format)format, *out, *choices);
}
// weights: one per expert
void remora_add_multiply_experts(void* program, const Weight* weights, const Rows* x,
                                 const Output* out, const Choices* choices) {
  add<MultiplyExperts>(program, weights, *x, *out, *choices);
}
void remora_add_weighted(void* program, const AddWeighted::Settings* settings) {
  add<AddWeighted>(program, *settings);
}
// weights: one per head
void remora_add_multiply_heads(void* program, const MultiplyHeads::Settings* settings,
                               const Weight* weights, const Rows* x, const Output* out) {
  add<MultiplyHeads>(program, *settings, weights, *x, *out);
}
void remora_add_join_latents(void* program, const JoinLatents::Settings* settings) {
  add<JoinLatents>(program, *settings);
}
void remora_add_join_heads(void* program, const JoinHeads::Settings* settings, int format,
                           const Rows* out) {
  add<JoinHeads>(program, *settings, (Format)format, *out);
}

void remora_program_run(void* program, int first, int last, int num_tokens, int num_sequences,
                        int num_logits) {
  auto* p = (Program*)program;
  set_sizes(p->batch, num_tokens, num_sequences, num_logits);
  p->run(first, last);
}
// Chunks of every operation for the step that is in the batch's arrays; nothing is computed.
void remora_program_chunks(void* program, int num_tokens, int num_sequences, int num_logits,
                           int* num_chunks) {
  auto* p = (Program*)program;
  set_sizes(p->batch, num_tokens, num_sequences, num_logits);
  p->count_chunks(num_chunks);
}

}  // extern "C"
