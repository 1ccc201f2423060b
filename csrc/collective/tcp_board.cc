// SPDX-License-Identifier: Apache-2.0
#include "collective/tcp_board.h"

#include "core/error.h"

namespace torch_ring {

TcpBoard::TcpBoard(int rank, std::vector<Connection*> connections, const Waiter& waiter,
                   std::vector<std::uint32_t> ranks_of_member, std::size_t capacity)
    : rank_(rank),
      connections_(std::move(connections)),
      waiter_(waiter),
      capacity_(capacity),
      frames_(rank,
              ranks_of_member.empty() ? std::vector<std::uint32_t>(connections_.size(), 1)
                                      : std::move(ranks_of_member),
              capacity),
      sent_(steps().size()),
      fds_(steps().size() + 1) {
  update_fds();
}

void TcpBoard::post(const Post& entry) {
  local_.assign(entry.local.begin(), entry.local.end());
  local_part_ = local_;
  Runs own;
  own.append({1, entry.common, entry.own});
  post_runs(own, {entry.waited_us, static_cast<std::uint32_t>(rank_), entry.most_us});
}

void TcpBoard::post_runs(const Runs& entries, const LeastWait& least_wait) {
  open_ = true;
  frames_.begin(entries, least_wait);
  sent_.assign(sent_.size(), 0);
  complete();
}

bool TcpBoard::complete() {
  if (!open_) return true;
  flush();
  while (!frames_.complete() && receive_frame()) flush();
  // All frames have to be sent too, before data may follow them on their connections.
  open_ = !frames_.complete() || !flush();
  update_fds();
  return !open_;
}

bool TcpBoard::peer_posted() {
  if (open_) return false;
  for (const BruckStep& step : steps()) {
    if (connection(step.from).readable()) return true;
  }
  update_fds();  // a connection may just have got its sockets
  return false;
}

Round TcpBoard::round() {
  entries_.assign(frames_.runs());
  return {
      entries_.runs(), {&local_part_, 1}, {&rank_, 1}, least_wait().last(), least_wait().most_us};
}

std::vector<int> TcpBoard::missing() const {
  std::vector<int> ranks;
  if (!open_) return ranks;
  const int size = static_cast<int>(connections_.size());
  for (int i = frames_.members_known(); i < size; ++i) ranks.push_back((rank_ + i) % size);
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

/// Sends the bytes that the sockets take; returns whether every begun frame is sent.
bool TcpBoard::flush() {
  bool gone = true;
  for (std::size_t i = 0; i < steps().size(); ++i) {
    const ByteSpan rest = frames_.frame(i).subspan(sent_[i]);
    if (!rest.empty()) sent_[i] += connection(steps()[i].to).try_send(rest);
    gone = gone && sent_[i] == frames_.frame(i).size();
  }
  return gone;
}

/// Receives the due frame's bytes that have arrived; returns whether it is complete.
bool TcpBoard::receive_frame() {
  const std::size_t step = frames_.due();
  Connection& from = connection(steps()[step].from);
  while (frames_.due() == step) {
    const std::span<std::byte> room = frames_.room();
    const std::size_t bytes = from.try_receive(room);
    try {
      frames_.absorb(bytes);
    } catch (const Error& error) {
      throw Error(ErrorKind::kPeerLost, from.peer() + " sent a garbled frame: " + error.what());
    }
    if (bytes < room.size()) return false;
  }
  return true;
}

void TcpBoard::update_fds() {
  for (std::size_t i = 0; i < steps().size(); ++i) {
    const BruckStep& step = steps()[i];
    if (open_) {
      const bool gone = sent_[i] == frames_.frame(i).size();
      fds_[i] = {gone ? -1 : connection(step.to).send_fd(), POLLOUT, 0};
    } else {
      fds_[i] = {connection(step.from).receive_fd(), POLLIN, 0};
    }
  }
  const bool due = open_ && !frames_.complete();
  fds_.back() = {due ? connection(steps()[frames_.due()].from).receive_fd() : -1, POLLIN, 0};
}

}  // namespace torch_ring
