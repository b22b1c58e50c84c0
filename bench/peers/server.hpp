// The server's half of server.py: lists of operations over the standard input, and the list of their
// results over the standard output, all in 8-byte words.

#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace server {

using Words = std::vector<uint64_t>;

// Mirrored by `KINDS` in server.py, in this order.
enum Status : uint64_t { kOk, kOom, kValue, kDriver, kInternal, kOther };

struct Operation {
  uint64_t code;
  std::array<uint64_t, 4> word;
  std::string_view text;
};

struct Result {
  uint64_t status = kOk;
  Words words;
  std::string text;
};

inline Result failure(Status status, std::string text) { return {status, {}, std::move(text)}; }

constexpr size_t kWord = sizeof(uint64_t);

inline size_t padded(size_t nbytes) { return (nbytes + kWord - 1) / kWord; }

// False at the end of the input: the other side has gone, and so may we.
inline bool read_words(uint64_t* words, size_t count) {
  auto* bytes = reinterpret_cast<char*>(words);
  for (size_t left = count * kWord; left != 0;) {
    const ssize_t got = read(STDIN_FILENO, bytes, left);
    if (got <= 0) return false;
    bytes += got;
    left -= static_cast<size_t>(got);
  }
  return true;
}

inline bool write_words(const Words& words) {
  const auto* bytes = reinterpret_cast<const char*>(words.data());
  for (size_t left = words.size() * kWord; left != 0;) {
    const ssize_t put = write(STDOUT_FILENO, bytes, left);
    if (put <= 0) return false;
    bytes += put;
    left -= static_cast<size_t>(put);
  }
  return true;
}

// Code, four words, the length of the text in bytes, the text.
inline Operation take_operation(const uint64_t*& words) {
  const auto* text = reinterpret_cast<const char*>(words + 6);
  const Operation operation{
      words[0], {words[1], words[2], words[3], words[4]}, std::string_view(text, words[5])};
  words += 6 + padded(words[5]);
  return operation;
}

// Status, how many words, the length of the text in bytes, the words, the text.
inline void put_result(Words& reply, const Result& result) {
  reply.insert(reply.end(), {result.status, result.words.size(), result.text.size()});
  reply.insert(reply.end(), result.words.begin(), result.words.end());
  if (result.text.empty()) return;
  const size_t start = reply.size();
  reply.resize(start + padded(result.text.size()), 0);
  std::memcpy(&reply[start], result.text.data(), result.text.size());
}

using Run = Result (*)(const Operation&);

inline bool serve_one(Run run) {
  uint64_t length = 0;
  if (!read_words(&length, 1)) return false;
  Words request(length);
  if (!read_words(request.data(), length)) return false;
  Words reply(1);
  const uint64_t* words = request.data();
  while (words != request.data() + length) put_result(reply, run(take_operation(words)));
  reply[0] = reply.size() - 1;
  return write_words(reply);
}

// Until the other side goes.
[[noreturn]] inline void serve(Run run) {
  while (serve_one(run)) {
  }
  _exit(0);  // upstream's own clean-up at exit is of no interest
}

}  // namespace server
