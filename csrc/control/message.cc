// SPDX-License-Identifier: Apache-2.0
#include "control/message.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace torch_ring {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

namespace {

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T get(const char*& in) {
  T value;
  std::memcpy(&value, in, sizeof value);
  in += sizeof value;
  return value;
}

/// Whether a text of so many bytes may be a wait's.
bool is_wait(std::size_t text_bytes) {
  constexpr std::size_t kNumber = sizeof(std::uint64_t);
  constexpr std::size_t kRank = sizeof(std::uint32_t);
  return text_bytes >= kNumber && (text_bytes - kNumber) % kRank == 0 &&
         (text_bytes - kNumber) / kRank <= Message::Wait::kMostRanks;
}

bool plausible(const Message& message, std::size_t text_bytes) {
  const bool own = message.rank == message.reporter;
  switch (message.kind) {
    case Message::Kind::kHeartbeat:
      return own && message.set == 0 && message.rounds == 0 && text_bytes == 0;
    case Message::Kind::kLeft:
      return true;
    case Message::Kind::kDeparted:
      return own && message.set == 0 && message.rounds == 0;
    case Message::Kind::kLost:
      return !own && message.set == 0 && message.rounds == 0;
    case Message::Kind::kFailed:
      return own && message.rounds == 0;
    case Message::Kind::kWaits:
      return own && message.rounds == 0 && is_wait(text_bytes);
    case Message::Kind::kAsks:
      return own && text_bytes <= Message::kQuestionBytes;
    case Message::Kind::kAnswers:
      return own;
    case Message::Kind::kStops:
      return own && message.set == 0;
  }
  return false;
}

/// The beginning of a text that fits, not cut within a UTF-8 character.
std::string cut(std::string text) {
  if (text.size() <= Message::kTextBytes) return text;
  std::size_t end = Message::kTextBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  text.resize(end);
  return text;
}

}  // namespace

Message Message::left(int rank, std::uint64_t set, std::uint64_t rounds, int members,
                      std::string why) {
  return {Kind::kLeft, {}, rank, members - 1, set, rounds, cut(std::move(why))};
}

Message Message::departed(int rank, std::string why) {
  return {Kind::kDeparted, {}, rank, rank, 0, 0, cut(std::move(why))};
}

Message Message::lost(int rank, int reporter, std::string how) {
  return {Kind::kLost, ErrorKind::kPeerLost, rank, reporter, 0, 0, cut(std::move(how))};
}

Message Message::failed(int rank, std::uint64_t set, const Error& cause) {
  return {Kind::kFailed, cause.kind(), rank, rank, set, 0, cut(cause.what())};
}

Message Message::waits(int rank, std::uint64_t set, const Wait& wait) {
  Message message{Kind::kWaits, {}, rank, rank, set, 0, {}};
  put(message.text, wait.number);
  for (std::size_t i = 0; i < std::min(wait.ranks.size(), Wait::kMostRanks); ++i) {
    put(message.text, static_cast<std::uint32_t>(wait.ranks[i]));
  }
  return message;
}

Message::Wait Message::wait() const {
  Wait wait;
  const char* in = text.data();
  const char* const end = in + text.size();
  wait.number = get<std::uint64_t>(in);
  while (in < end) wait.ranks.push_back(static_cast<int>(get<std::uint32_t>(in)));
  return wait;
}

Message Message::answers(int rank, int whom, std::uint64_t number, std::string text) {
  return {Kind::kAnswers,      {}, rank, rank, number, static_cast<std::uint64_t>(whom),
          cut(std::move(text))};
}

void Message::append_to(std::string& frames) const {
  const auto text_bytes = std::min(text.size(), kTextBytes);
  put(frames, static_cast<std::uint8_t>(kind));
  put(frames, static_cast<std::uint8_t>(error));
  put(frames, static_cast<std::uint16_t>(text_bytes));
  put(frames, static_cast<std::uint32_t>(rank));
  put(frames, static_cast<std::uint32_t>(reporter));
  put(frames, set);
  put(frames, rounds);
  frames.append(text, 0, text_bytes);
}

std::optional<Message> MessageParser::next() {
  if (bytes_.size() - done_ < Message::kHeaderBytes) {
    bytes_.erase(0, std::exchange(done_, 0));
    return std::nullopt;
  }
  const char* in = bytes_.data() + done_;
  Message message;
  message.kind = static_cast<Message::Kind>(get<std::uint8_t>(in));
  const auto error = get<std::uint8_t>(in);
  const auto text_bytes = get<std::uint16_t>(in);
  const auto rank = get<std::uint32_t>(in);
  const auto reporter = get<std::uint32_t>(in);
  message.set = get<std::uint64_t>(in);
  message.rounds = get<std::uint64_t>(in);
  const auto size = static_cast<std::uint32_t>(size_);
  message.error = static_cast<ErrorKind>(error);
  message.rank = static_cast<int>(rank);
  message.reporter = static_cast<int>(reporter);
  if (error > static_cast<std::uint8_t>(ErrorKind::kInternal) || rank >= size || reporter >= size ||
      text_bytes > Message::kTextBytes || !plausible(message, text_bytes)) {
    throw Error(ErrorKind::kPeerLost, "sent something that is no control message");
  }
  if (bytes_.size() - done_ < Message::kHeaderBytes + text_bytes) {
    bytes_.erase(0, std::exchange(done_, 0));
    return std::nullopt;
  }
  message.text.assign(in, text_bytes);
  if (message.kind == Message::Kind::kWaits) {
    for (const int waited : message.wait().ranks) {
      if (waited < 0 || waited >= size_) {
        throw Error(ErrorKind::kPeerLost, "waits for a rank that does not exist");
      }
    }
  }
  const bool is_query =
      message.kind == Message::Kind::kAsks || message.kind == Message::Kind::kAnswers;
  if (is_query && message.rounds >= size) {
    throw Error(ErrorKind::kPeerLost, "writes to a rank that does not exist");
  }
  done_ += Message::kHeaderBytes + text_bytes;
  return message;
}

}  // namespace torch_ring
