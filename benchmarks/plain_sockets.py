# SPDX-License-Identifier: Apache-2.0
"""Times sending over one TCP connection, for hosts.py where there is no iperf3.

python plain_sockets.py receive 29533
python plain_sockets.py send 10.214.88.2 29533 3.0      # prints gigabytes a second
"""

import socket
import sys
import time

BLOCK_BYTES = 1 << 20


def receive(port: int) -> None:
    """Receive from one sender, and tell it the number of bytes."""
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            block, total = bytearray(BLOCK_BYTES), 0
            while received := connection.recv_into(block):
                total += received
            connection.sendall(total.to_bytes(8, "little"))


def send(address: str, port: int, seconds: float) -> float:
    """Send for a time, and at least one block; return gigabytes a second until all has arrived."""
    with socket.create_connection((address, port)) as connection:
        block, started = bytes(BLOCK_BYTES), time.perf_counter()
        connection.sendall(block)
        while time.perf_counter() - started < seconds:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        total = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
        return total / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        print(send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
