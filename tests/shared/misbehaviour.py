"""What a broken object store may answer: each function treats one connection its own way."""

from __future__ import annotations

import random
import socket
import time


def silent(connection: socket.socket) -> None:
    time.sleep(5.0)


def rubbish(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(random.Random(0).randbytes(5000))


def not_s3(connection: socket.socket) -> None:
    connection.recv(65536)
    body = b"<html>hello"
    connection.sendall(b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def bad_xml(connection: socket.socket) -> None:
    connection.recv(65536)
    body = b"<Error><Code>"
    connection.sendall(
        b"HTTP/1.1 404 No\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )


def rubbish_manifest(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nrubbish")


def endless(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    while True:
        connection.sendall(chunk)


def dripping(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.1)


def hangs_up(connection: socket.socket) -> None:
    connection.recv(65536)
