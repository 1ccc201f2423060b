#include "collective/tcp_board.h"

#include <cstring>

#include "core/error.h"

namespace torch_ring {

namespace {

constexpr std::size_t kSizeBytes = sizeof(std::uint64_t);

/// Bytes of an entry in a frame. Both parts are multiples of 8, so that every entry is aligned.
constexpr std::size_t framed_bytes(std::size_t entry_bytes) {
  return kSizeBytes + (entry_bytes + 7) / 8 * 8;
}

std::uint64_t load_size(const std::byte* from) {
  std::uint64_t size = 0;
  std::memcpy(&size, from, sizeof size);
  return size;
}

[[noreturn]] void throw_garbled(const Connection& from, const std::string& what) {
  throw Error(ErrorKind::kPeerLost, from.peer() + " sent a garbled frame: " + what);
}

}  // namespace

TcpBoard::TcpBoard(int rank, std::vector<Connection*> connections, const Waiter& waiter,
                   std::size_t capacity)
    : rank_(rank),
      connections_(std::move(connections)),
      steps_(bruck_steps(rank, static_cast<int>(connections_.size()))),
      waiter_(waiter),
      capacity_(capacity),
      frames_(steps_.size()),
      fds_(steps_.size() + 1) {
  update_fds();
}

void TcpBoard::post(std::span<const std::byte> entry) {
  ++round_;
  open_ = true;
  step_ = 0;
  for (Frame& frame : frames_) {
    frame.bytes.clear();
    frame.sent = 0;
  }

  entries_.assign(framed_bytes(entry.size()), std::byte{0});
  const std::uint64_t bytes = entry.size();
  std::memcpy(entries_.data(), &bytes, sizeof bytes);
  if (!entry.empty()) std::memcpy(entries_.data() + kSizeBytes, entry.data(), entry.size());
  entry_offsets_.assign(1, 0);

  begin_step();
  complete();
}

bool TcpBoard::complete() {
  if (!open_) return true;
  flush();
  while (step_ < steps_.size() && receive_frame()) {
    ++step_;
    begin_step();
    flush();
  }
  // All frames have to be sent too, before data may follow them on their connections.
  open_ = step_ < steps_.size() || !flush();
  update_fds();
  return !open_;
}

bool TcpBoard::peer_posted() {
  if (open_) return false;
  for (const BruckStep& step : steps_) {
    if (connection(step.from).readable()) return true;
  }
  return false;
}

std::span<const std::byte> TcpBoard::entry(int rank) const {
  const int size = static_cast<int>(connections_.size());
  const std::byte* entry = entries_.data() + at(entry_offsets_, (rank - rank_ + size) % size);
  return {entry + kSizeBytes, load_size(entry)};
}

std::vector<int> TcpBoard::missing() const {
  std::vector<int> ranks;
  if (!open_) return ranks;
  const int size = static_cast<int>(connections_.size());
  for (int i = static_cast<int>(entry_offsets_.size()); i < size; ++i)
    ranks.push_back((rank_ + i) % size);
  return ranks;
}

void TcpBoard::wait_until(Clock::time_point deadline, std::chrono::microseconds spin) {
  waiter_.wait_until(
      [&] {
        return woken_.exchange(false, std::memory_order_seq_cst) ||
               (open_ ? complete() : peer_posted());
      },
      deadline, spin, fds());
}

void TcpBoard::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  waiter_.wake();
}

/// Sends the bytes that the sockets take; returns whether every frame begun is sent.
bool TcpBoard::flush() {
  bool gone = true;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Frame& frame = frames_[i];
    const std::span<const std::byte> rest = std::span(frame.bytes).subspan(frame.sent);
    if (!rest.empty()) frame.sent += connection(steps_[i].to).try_send(rest);
    gone = gone && frame.sent == frame.bytes.size();
  }
  return gone;
}

/// Makes the frame of the next step, if there is one.
void TcpBoard::begin_step() {
  received_ = 0;
  if (step_ == steps_.size()) return;
  const auto count = static_cast<std::size_t>(steps_[step_].count);
  const std::size_t bytes = count < entry_offsets_.size() ? entry_offsets_[count] : entries_.size();
  const Header header{round_, bytes};
  std::vector<std::byte>& frame = frames_[step_].bytes;
  frame.resize(sizeof header + bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  std::memcpy(frame.data() + sizeof header, entries_.data(), bytes);
}

/// Receives the bytes that have arrived of the frame that is due; returns whether it is complete.
bool TcpBoard::receive_frame() {
  const BruckStep& step = steps_[step_];
  Connection& from = connection(step.from);
  const auto fill = [&](std::span<std::byte> rest) {
    const std::size_t bytes = from.try_receive(rest);
    received_ += bytes;
    return bytes == rest.size();
  };
  if (received_ < sizeof header_) {
    const auto header = std::as_writable_bytes(std::span(&header_, 1));
    if (!fill(header.subspan(received_))) return false;
    begin_entries(from, step.count);
  }
  const std::size_t left = sizeof header_ + header_.bytes - received_;
  if (!fill(std::span(entries_).last(left))) return false;
  index_entries(from, step.count);
  return true;
}

/// Checks a received header, and makes room for the entries of its frame.
void TcpBoard::begin_entries(const Connection& from, int count) {
  if (header_.round != round_) {
    throw_garbled(
        from, "of round " + std::to_string(header_.round) + " in round " + std::to_string(round_));
  }
  const auto entries = static_cast<std::size_t>(count);
  if (header_.bytes < entries * kSizeBytes || header_.bytes > entries * framed_bytes(capacity_)) {
    throw_garbled(
        from, std::to_string(header_.bytes) + " bytes for " + std::to_string(count) + " entries");
  }
  entries_.resize(entries_.size() + header_.bytes);
}

/// Finds the entries of a received frame.
void TcpBoard::index_entries(const Connection& from, int count) {
  std::size_t at = entries_.size() - header_.bytes;
  for (int i = 0; i < count; ++i) {
    const std::size_t left = entries_.size() - at;
    const std::uint64_t bytes = left < kSizeBytes ? capacity_ + 1 : load_size(entries_.data() + at);
    if (bytes > capacity_ || framed_bytes(bytes) > left) {
      throw_garbled(from, "an entry that does not fit");
    }
    entry_offsets_.push_back(at);
    at += framed_bytes(bytes);
  }
  if (at != entries_.size()) throw_garbled(from, "more than its entries");
}

void TcpBoard::update_fds() {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    if (open_) {
      const bool gone = frames_[i].sent == frames_[i].bytes.size();
      fds_[i] = {gone ? -1 : connection(steps_[i].to).send_fd(), POLLOUT, 0};
    } else {
      fds_[i] = {connection(steps_[i].from).receive_fd(), POLLIN, 0};
    }
  }
  const bool due = open_ && step_ < steps_.size();
  fds_.back() = {due ? connection(steps_[step_].from).receive_fd() : -1, POLLIN, 0};
}

}  // namespace torch_ring
