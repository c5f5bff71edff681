// Scratch memory of a thread.
#pragma once

#include <cstddef>
#include <vector>

namespace remora {

// Elements in whole cache lines, which tiles and vectors read without crossing one. Growing loses the
// content.
template <class T>
class Buffer {
 public:
  T* reserve(size_t size) {
    const size_t lines = (size * sizeof(T) + LINE - 1) / LINE;
    if (lines_.size() < lines) lines_.resize(lines);
    return data();
  }
  T* data() { return (T*)lines_.data(); }
  const T* data() const { return (const T*)lines_.data(); }
  T* begin() { return data(); }
  T& operator[](size_t at) { return data()[at]; }

 private:
  static constexpr size_t LINE = 64;
  struct alignas(LINE) Line {
    char bytes[LINE];
  };
  std::vector<Line> lines_;
};

}  // namespace remora
