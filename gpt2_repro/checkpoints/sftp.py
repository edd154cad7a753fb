"""Copy files to another machine over SSH. The module needs the package paramiko, which is optional."""

from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem


PATIENCE = 60  # seconds without an answer after which a connection counts as dead


class SafeSFTP(SFTPFileSystem):
    """fsspec's SFTP with known hosts only, time limits, and files that appear when they are complete."""

    cachable = False  # each use connects again, because a connection can die

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()  # refuses hosts with an unknown key
        self.client.load_system_host_keys()
        self.client.connect(self.host, timeout=PATIENCE, channel_timeout=PATIENCE, **self.ssh_kwargs)
        self.ftp = self.client.open_sftp()
        self.ftp.get_channel().settimeout(PATIENCE)

    def get_file(self, rpath: str, lpath: str, callback: Any, **kwargs: Any) -> None:
        self.ftp.get(rpath, lpath, lambda done, _: callback.absolute_update(done))

    def put_file(self, lpath: str, rpath: str, callback: Any, **kwargs: Any) -> None:
        self.ftp.put(lpath, f"{rpath}.partial", lambda done, _: callback.absolute_update(done))
        self.mv(f"{rpath}.partial", rpath)
