"""Serve the local disk by SFTP, in a thread."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko


class Anyone(paramiko.ServerInterface):
    """Accepts each key of each user."""

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


def reply(action: Callable[[], Any]) -> int:
    """Perform an action on the disk. Return the status of SFTP."""
    try:
        action()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno)
    return paramiko.SFTP_OK


class Disk(paramiko.SFTPServerInterface):
    """The local disk. Relative paths start in HOME."""

    def _path(self, path: str) -> Path:
        return Path.home() / path

    def canonicalize(self, path: str) -> str:
        return str(self._path(path))

    def list_folder(self, path: str) -> Any:
        try:
            return [paramiko.SFTPAttributes.from_stat(item.stat(), item.name) for item in self._path(path).iterdir()]
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    def stat(self, path: str) -> Any:
        try:
            return paramiko.SFTPAttributes.from_stat(self._path(path).stat())
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    lstat = stat

    def open(self, path: str, flags: int, attr: Any) -> Any:
        handle = paramiko.SFTPHandle(flags)
        try:
            file = os.fdopen(os.open(self._path(path), flags, 0o644), "wb" if flags & os.O_WRONLY else "rb")
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        handle.readfile = handle.writefile = file
        return handle

    def remove(self, path: str) -> int:
        return reply(self._path(path).unlink)

    def rmdir(self, path: str) -> int:
        return reply(self._path(path).rmdir)

    def mkdir(self, path: str, attr: Any) -> int:
        return reply(self._path(path).mkdir)

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        return reply(lambda: self._path(oldpath).replace(self._path(newpath)))


@contextlib.contextmanager
def serve(home: Path) -> Iterator[int]:
    """Yield the port of a server. Write its key and the key of its user to the folder .ssh of `home`."""
    key, transports = paramiko.ECDSAKey.generate(), []
    (home / ".ssh").mkdir(parents=True)
    key.write_private_key_file(str(home / ".ssh" / "id_ecdsa"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (home / ".ssh" / "known_hosts").write_text(
            f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n", encoding="utf-8"
        )

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    transport = paramiko.Transport(server.accept()[0])
                    transports.append(transport)
                    transport.add_server_key(key)
                    transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Disk)
                    transport.start_server(threading.Event(), Anyone())

        threading.Thread(target=accept, daemon=True).start()
        yield port
        for transport in transports:
            transport.close()
        server.shutdown(socket.SHUT_RDWR)
