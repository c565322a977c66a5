"""A pyzmq peer for the interop tests. Reads its orders as arguments, prints what it saw."""

import sys
import threading

import zmq


def push(endpoint, kind):
    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 20)
    # Often, but patient: a busy machine may answer late.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
    socket.connect(endpoint)
    if kind == "shapes":
        socket.send_multipart([b"one"])
        socket.send_multipart([b"", b"two", b""])
        socket.send_multipart([b"x" * 300, bytes(1 << 20), b""])
    else:
        for number in range(5000):
            socket.send_multipart([b"n", str(number).encode()])
    print("sent", flush=True)
    # Stay, so that heartbeats are answered while the other side looks at the connection.
    sys.stdin.readline()
    socket.close()


def pull(messages):
    socket = zmq.Context().socket(zmq.PULL)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 20)
    # Often, but patient: a busy machine may answer late.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print("port", port, flush=True)
    total = frames = 0
    for number in range(messages):
        parts = socket.recv_multipart()
        frames += len(parts)
        total += sum(map(len, parts))
        if parts[0] == b"n":
            assert parts[1] == str(number).encode(), (parts[1], number)
    print("pulled", frames, total, flush=True)


def crowd(endpoint, count):
    context = zmq.Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, count + 10)
    sockets = []
    for number in range(count):
        socket = context.socket(zmq.PUSH)
        socket.connect(endpoint)
        socket.send_multipart([b"crowd", str(number).encode()])
        sockets.append(socket)
    print("sent", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    watchdog = threading.Timer(60, lambda: __import__("os")._exit(3))
    watchdog.daemon = True
    watchdog.start()
    order, *rest = sys.argv[1:]
    if order == "push":
        push(rest[0], rest[1])
    elif order == "pull":
        pull(int(rest[0]))
    else:
        crowd(rest[0], int(rest[1]))
