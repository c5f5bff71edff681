// Runs cases on a compiled library through its C interface and compares the results.
//
//   runner LIBRARY CASE...
//
// A case is a file of records, each a line "name type count" and the values; `cases.py` writes it. A
// case computes rows of floats. They are compared with `expected`, each within `bound`, and with `bits`
// if the case has them; then parts are computed alone, and must have the same bits. Prints the name of
// each case and a hash of its result, or its fault. Exits with 1 if there is a fault.
//
// Knows the library's structures. Knows nothing of how expected values are computed.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "program.h"

using namespace remora;

// From api.cpp and sampling.cpp.
extern "C" {
int remora_may_use_tiles();
int remora_padded_k(int format, int k);
int64_t remora_panel_bytes(int format, int k);
int remora_group_size(int format);
int64_t remora_page_bytes(const KvCache* cache);
void* remora_team_new(int num_threads);
void remora_team_free(void* team);
void remora_pack(void* team, const Weight* weight, const void* from, int source, int gated,
                 int spent);
void* remora_program_new(void* team, const Batch* batch);
void remora_program_free(void* program);
void remora_program_run(void* program, int first, int last, int num_tokens, int num_sequences,
                        int num_logits);
void remora_add_norm(void* program, int on_logits, const float* x, int stride,
                     const NormWeights* weights, int format, const Rows* out, int adds);
void remora_add_round(void* program, int on_logits, int rows_per_token, const float* x, int stride,
                      int size, int format, const Rows* out);
void remora_add_multiply(void* program, int on_logits, const Weight* weight, const Rows* x,
                         const Output* out, const LowRank* low);
void remora_add_rotate_and_store(void* program, const RotateAndStore::Settings* settings);
void remora_add_attend(void* program, const Attention* attention);
void remora_choose(void* team, const float* logits, int64_t stride, int num_rows, int vocab_size,
                   const float* temperature, const int64_t* keys, const int64_t* top_k,
                   const double* top_p, const float* min_p, int64_t* token_ids, uint8_t* is_good);
void remora_token_logprobs(void* team, const float* logits, int64_t stride, int num_rows,
                           int vocab_size, const int64_t* token_ids, int num_top, float* logprobs,
                           int32_t* ranks, int64_t* top_ids, float* top_logprobs);
}

namespace {

typedef std::vector<float> Floats;

// The library is loaded, not linked: functions that its headers define must not be replaced by this
// program's, which is compiled for another instruction set.
void* library = nullptr;

void* symbol(const char* name) {
  if (void* found = dlsym(library, name)) return found;
  throw std::runtime_error(std::string("the library has no function ") + name);
}
#define CALL(name) (*(decltype(&name))symbol(#name))

// Zeroed memory, aligned like tensors.
class Buffer {
 public:
  explicit Buffer(int64_t size) : lines_((size + 63) / 64) {}
  template <class T>
  T* as() { return (T*)lines_.data(); }

 private:
  struct alignas(64) Line {
    char bytes[64] = {};
  };
  std::vector<Line> lines_;
};

class Case {
 public:
  explicit Case(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    for (std::string line; std::getline(file, line);) {
      std::string name, type;
      int64_t count = 0;
      std::istringstream(line) >> name >> type >> count;
      const int64_t size = count * (type.back() - '0');
      Record record{type, count, Buffer(size)};
      if (!file.read(record.values.as<char>(), size))
        throw std::runtime_error("the file ends within " + name);
      records_.emplace(name, std::move(record));
    }
  }

  bool has(const std::string& name) const { return records_.count(name); }
  int64_t count(const std::string& name) const { return find(name).count; }

  template <class T>
  T* array(const std::string& name) const {
    const char* kind = std::is_floating_point_v<T> ? "f" : "i";
    Record& found = find(name);
    if (found.type != kind + std::to_string(sizeof(T)))
      throw std::runtime_error(name + " has the type " + found.type);
    return found.values.as<T>();
  }
  template <class T>
  T* array_or_null(const std::string& name) const {
    return has(name) ? array<T>(name) : nullptr;
  }
  int number(const std::string& name) const { return *array<int32_t>(name); }
  float real(const std::string& name) const { return *array<float>(name); }

 private:
  struct Record {
    std::string type;
    int64_t count;
    Buffer values;
  };
  Record& find(const std::string& name) const {
    const auto found = records_.find(name);
    if (found == records_.end()) throw std::runtime_error("the case has no " + name);
    return found->second;
  }
  mutable std::map<std::string, Record> records_;
};

struct Threads {
  explicit Threads(int number) : team(CALL(remora_team_new)(number)) {}
  ~Threads() { CALL(remora_team_free)(team); }
  Threads(const Threads&) = delete;
  void* const team;
};

struct Steps {
  Steps(const Threads& threads, Batch batch, int max_tokens) : adapters(max_tokens) {
    batch.adapters = adapters.data();
    program = CALL(remora_program_new)(threads.team, &batch);
  }
  ~Steps() { CALL(remora_program_free)(program); }
  Steps(const Steps&) = delete;
  void run(int num_operations, int num_tokens, int num_sequences) {
    CALL(remora_program_run)(program, 0, num_operations, num_tokens, num_sequences, 0);
  }
  std::vector<int32_t> adapters;  // none
  void* program;
};

// What is computed of a case, and how.
struct Part {
  int first, count, num_threads;
  std::vector<int> chunks = {};  // attention: tokens of each step
  int num_sequences = 1;         // attention: equal ones in the same steps; the last one is read
};

// x [rows, k] times a weight [n, k], after its epilogue.
Floats multiply(const Case& c, const Part& part) {
  const auto format = (Format)c.number("format");
  const auto epilogue = (Epilogue)c.number("epilogue");
  const bool is_gated = epilogue == GATED;
  const int n = c.number("n"), k = c.number("k"), count = part.count;
  const int columns = is_gated ? 2 * ceil_div(n / 2, LANES) * LANES : n;
  const int num_panels = ceil_div(columns, PANEL), size = num_panels * PANEL;
  const Format of_rows = format == F16 ? F32 : format;
  const int stride = CALL(remora_padded_k)(of_rows, k);
  const int groups = stride / CALL(remora_group_size)(format);
  Buffer packed(num_panels * CALL(remora_panel_bytes)(format, k)), bias(size * 4);
  Buffer values(count * stride * 4), scales(count * groups * 4), sums(count * groups * 4);
  Buffer out(count * size * 4);

  const Threads threads(part.num_threads);
  if (c.has("bias")) std::copy_n(c.array<float>("bias"), n, bias.as<float>());
  const Weight weight{format, n, k, num_panels, packed.as<char>(),
                      c.has("bias") ? bias.as<float>() : nullptr};
  CALL(remora_pack)(threads.team, &weight, c.array<float>("weight"), F32, is_gated, false);
  for (int row = 0; epilogue == ADD && row < count; row++)
    std::copy_n(c.array<float>("start") + (part.first + row) * n, n, out.as<float>() + row * size);

  Steps steps(threads, Batch{}, count);
  const Rows rows{values.as<void>(), stride, scales.as<float>(), sums.as<int32_t>()};
  const Output to{epilogue, is_gated ? SILU : LINEAR, 0, 0, 0, false, out.as<void>(), size};
  CALL(remora_add_round)
  (steps.program, false, 1, c.array<float>("x") + part.first * k, k, k, of_rows, &rows);
  CALL(remora_add_multiply)(steps.program, false, &weight, &rows, &to, nullptr);
  steps.run(2, count, 0);
  Floats result;
  for (int row = 0; row < count; row++) {
    const float* from = out.as<float>() + row * size;
    result.insert(result.end(), from, from + (is_gated ? n / 2 : n));
  }
  return result;
}

// x [rows, size], normalised.
Floats normalise(const Case& c, const Part& part) {
  const int size = (int)c.count("weight");
  const NormWeights weights{c.array<float>("weight"), c.array_or_null<float>("bias"), size,
                            c.number("span"), (bool)c.number("is_centered"), c.real("epsilon")};
  Floats result(part.count * size);
  const Rows out{result.data(), size, nullptr, nullptr};
  const Threads threads(part.num_threads);
  Steps steps(threads, Batch{}, part.count);
  CALL(remora_add_norm)
  (steps.program, false, c.array<float>("x") + part.first * size, size, &weights, F32, &out, false);
  steps.run(1, part.count, 0);
  return result;
}

// Of each row of logits: the id drawn, log-probability and rank of `token`, the likeliest ids and
// their log-probabilities.
Floats sample(const Case& c, const Part& part) {
  const int size = (int)c.count("logits") / c.number("rows"), top = c.number("num_top");
  const int first = part.first, count = part.count;
  const float* logits = c.array<float>("logits") + first * size;
  std::vector<int64_t> ids(count), top_ids(count * top);
  std::vector<uint8_t> is_good(count);
  std::vector<int32_t> ranks(count);
  Floats logprobs(count), top_logprobs(count * top), result;
  const Threads threads(part.num_threads);
  CALL(remora_choose)
  (threads.team, logits, size, count, size, c.array<float>("temperature") + first,
   c.array<int64_t>("keys") + first, c.array<int64_t>("top_k") + first,
   c.array<double>("top_p") + first, c.array<float>("min_p") + first, ids.data(), is_good.data());
  CALL(remora_token_logprobs)
  (threads.team, logits, size, count, size, c.array<int64_t>("token") + first, top, logprobs.data(),
   ranks.data(), top_ids.data(), top_logprobs.data());
  for (int row = 0; row < count; row++) {
    result.insert(result.end(), {(float)ids[row], logprobs[row], (float)ranks[row]});
    for (int i = 0; i < top; i++) result.push_back((float)top_ids[row * top + i]);
    for (int i = 0; i < top; i++) result.push_back(top_logprobs[row * top + i]);
  }
  return result;
}

// Attention of a sequence that arrives in chunks, on pages in descending order.
Floats attend(const Case& c, const Part& part) {
  const int num_tokens = c.number("rows"), num_sequences = part.num_sequences;
  const int num_heads = c.number("num_heads"), page_size = c.number("page_size");
  const int pages_each = ceil_div(num_tokens, page_size), num_pages = num_sequences * pages_each;
  KvCache cache{nullptr, (Format)c.number("kv_format"), PLAIN, false, num_pages, page_size,
                c.number("num_kv_heads"), c.number("head_dim"), nullptr};
  Buffer pages(num_pages * CALL(remora_page_bytes)(&cache));
  cache.data = pages.as<char>();
  const int width = num_heads * cache.head_dim;
  const int stride = width + 2 * cache.num_kv_heads * cache.head_dim;

  std::vector<int64_t> positions(num_tokens * num_sequences), slots(positions.size());
  std::vector<int32_t> starts(num_sequences + 1), lengths(num_sequences), table_rows(num_sequences);
  std::vector<int32_t> tables(num_pages);
  Floats qkv(positions.size() * stride), out(positions.size() * width), result;
  Batch batch{};
  batch.positions = positions.data(), batch.slots = slots.data(), batch.starts = starts.data();
  batch.lengths = lengths.data(), batch.table_rows = table_rows.data();
  batch.tables = tables.data(), batch.table_stride = pages_each;
  for (int page = 0; page < num_pages; page++) tables[page] = num_pages - 1 - page;

  const int num_pairs = (int)c.count("cosines") / num_tokens;
  const RotateAndStore::Settings rotation{
      cache, 0, num_heads, qkv.data(), stride, c.array<float>("cosines"), c.array<float>("sines"), 0,
      num_pairs, false, nullptr, {}, {}, false};
  const Attention attention{cache, 0, num_heads, c.number("window"), (bool)c.number("is_chunked"),
                            c.real("scale"), c.real("soft_cap"), c.array_or_null<float>("sinks"),
                            c.array_or_null<float>("slopes"), qkv.data(), stride, out.data(), width,
                            false};
  const Threads threads(part.num_threads);
  Steps steps(threads, batch, (int)positions.size());
  CALL(remora_add_rotate_and_store)(steps.program, &rotation);
  CALL(remora_add_attend)(steps.program, &attention);
  int done = 0;
  for (const int chunk : part.chunks) {
    for (int s = 0; s < num_sequences; s++) {
      starts[s] = s * chunk, table_rows[s] = s, lengths[s] = done + chunk;
      std::copy_n(c.array<float>("qkv") + done * stride, chunk * stride, &qkv[s * chunk * stride]);
      for (int i = 0, at = done; i < chunk; i++, at++) {
        positions[s * chunk + i] = at;
        slots[s * chunk + i] =
            tables[s * pages_each + at / page_size] * (int64_t)page_size + at % page_size;
      }
    }
    starts[num_sequences] = num_sequences * chunk;
    steps.run(2, num_sequences * chunk, num_sequences);
    const auto last = out.begin() + (num_sequences - 1) * chunk * width;
    result.insert(result.end(), last, last + chunk * width);
    done += chunk;
  }
  return result;
}

void compare(const Case& c, const Floats& result) {
  if ((int64_t)result.size() != c.count("expected"))
    throw std::runtime_error("there are " + std::to_string(result.size()) + " results");
  const double *expected = c.array<double>("expected"), *bound = c.array<double>("bound");
  const auto* bits = c.array_or_null<float>("bits");
  int num_wrong = 0;
  std::ostringstream fault;
  for (size_t i = 0; i < result.size(); i++) {
    const bool is_near = std::abs(result[i] - expected[i]) <= bound[i];
    if (is_near && (!bits || result[i] == bits[i])) continue;
    if (num_wrong++) continue;
    fault << "value " << i << " is " << std::hexfloat << result[i] << " instead of ";
    fault << (is_near ? bits[i] : expected[i]) << (is_near ? " exactly" : " about");
  }
  if (num_wrong) throw std::runtime_error(fault.str() + "; wrong: " + std::to_string(num_wrong));
}

void require_equal(const Floats& part, const float* whole, const std::string& what) {
  if (memcmp(part.data(), whole, part.size() * sizeof(float)) != 0)
    throw std::runtime_error(what + " has other bits");
}

// Compute the whole case, then rows of it alone.
Floats run_rows(const Case& c, Floats (*compute)(const Case&, const Part&)) {
  const int rows = c.number("rows");
  const Floats whole = compute(c, {0, rows, 1});
  compare(c, whole);
  require_equal(compute(c, {0, rows, 3}), whole.data(), "the result of 3 threads");
  const int64_t width = whole.size() / rows;
  for (const int first : {0, rows / 2, rows - 1})
    require_equal(compute(c, {first, 1, 1}), &whole[first * width], "row " + std::to_string(first));
  const int first = rows / 3;
  require_equal(compute(c, {first, rows - first, 2}), &whole[first * width], "the last rows");
  return whole;
}

// Compute attention in one step, then in chunks.
Floats run_attention(const Case& c) {
  const int tokens = c.number("rows");
  const Floats whole = attend(c, {0, tokens, 1, {tokens}});
  compare(c, whole);
  require_equal(attend(c, {0, tokens, 3, {tokens}}), whole.data(), "the result of 3 threads");
  const int half = tokens / 2;
  const std::vector<int> chunks{half, 1, 1, tokens - half - 2};
  require_equal(attend(c, {0, tokens, 2, chunks}), whole.data(), "a sequence in chunks");
  require_equal(attend(c, {0, tokens, 2, chunks, 2}), whole.data(), "the second of two sequences");
  return whole;
}

Floats run(const std::string& kind, const Case& c) {
  if (kind == "product") return run_rows(c, multiply);
  if (kind == "norm") return run_rows(c, normalise);
  if (kind == "sampling") return run_rows(c, sample);
  if (kind == "attention") return run_attention(c);
  throw std::runtime_error("there is no such kind of case");
}

// FNV-1a.
uint64_t hash_of(const Floats& values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < values.size() * sizeof(float); i++)
    hash = (hash ^ ((const uint8_t*)values.data())[i]) * 0x100000001b3;
  return hash;
}

}  // namespace

// The kind of a case is its name up to the first dash.
int main(int argc, char** argv) {
  if (argc > 1) library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library || !CALL(remora_may_use_tiles)()) {
    fprintf(stderr, "the library cannot be used: %s\n", library ? "no tiles" : dlerror());
    return 2;
  }
  int status = 0;
  for (int i = 2; i < argc; i++) {
    const std::string name = std::filesystem::path(argv[i]).stem();
    try {
      const Floats result = run(name.substr(0, name.find('-')), Case(argv[i]));
      printf("%s %016llx\n", name.c_str(), (unsigned long long)hash_of(result));
    } catch (const std::exception& fault) {
      printf("%s: %s\n", name.c_str(), fault.what());
      status = 1;
    }
  }
  return status;
}
