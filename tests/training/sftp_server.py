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


def reply(action: Callable[[], Any]) -> Any:
    """Return the result of an action on the disk, or the status of its error."""
    try:
        return action()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno)


class Disk(paramiko.SFTPServerInterface):
    """The local disk. Relative paths start in HOME."""

    def _path(self, path: str) -> Path:
        return Path.home() / path

    def canonicalize(self, path: str) -> str:
        return str(self._path(path))

    def list_folder(self, path: str) -> Any:
        return reply(lambda: [paramiko.SFTPAttributes.from_stat(p.stat(), p.name) for p in self._path(path).iterdir()])

    def stat(self, path: str) -> Any:
        return reply(lambda: paramiko.SFTPAttributes.from_stat(self._path(path).stat()))

    lstat = stat

    def open(self, path: str, flags: int, attr: Any) -> Any:
        def open_file() -> paramiko.SFTPHandle:
            handle, descriptor = paramiko.SFTPHandle(flags), os.open(self._path(path), flags, 0o644)
            handle.readfile = handle.writefile = os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")
            return handle

        return reply(open_file)

    def remove(self, path: str) -> int:
        return reply(self._path(path).unlink) or paramiko.SFTP_OK

    def rmdir(self, path: str) -> int:
        return reply(self._path(path).rmdir) or paramiko.SFTP_OK

    def mkdir(self, path: str, attr: Any) -> int:
        return reply(self._path(path).mkdir) or paramiko.SFTP_OK

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        return reply(lambda: self._path(oldpath).replace(self._path(newpath)) and paramiko.SFTP_OK)


@contextlib.contextmanager
def serve(home: Path) -> Iterator[int]:
    """Yield the port of a server. Write its key and the key of its user to the folder .ssh of `home`."""
    key, transports = paramiko.ECDSAKey.generate(), []
    (home / ".ssh").mkdir(parents=True)
    key.write_private_key_file(str(home / ".ssh" / "id_ecdsa"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        known = f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
        (home / ".ssh" / "known_hosts").write_text(known, encoding="utf-8")

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
