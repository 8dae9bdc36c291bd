"""Files that appear whole or not at all, for their owner alone; and files of others, which are read within bounds."""

from __future__ import annotations

import codecs
import errno
import io
import os
import stat
import tempfile
from pathlib import Path

from memadvisor.errors import UsageError

MOST_INPUT_BYTES = 64 * 2**20  # a plan of 10,000 units has 3 MB


def read_input(path: Path, *, of_spreadsheet: bool = False) -> str:
    """The text of a file or pipe that a user has named: a plan, a table, a configuration. Raises OSError, UnicodeDecodeError.

    What spreadsheets write may be UTF-16, which says so at its beginning, or Windows' own characters.

    What has no end (/dev/zero) would take all memory before anybody could say that it is no plan.
    """
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):  # not a pipe, which `<(command)` is
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        data = file.read(MOST_INPUT_BYTES + 1)
    if len(data) > MOST_INPUT_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_INPUT_BYTES // 2**20} MiB", str(path))
    encoding = _encoding(data) if of_spreadsheet else "utf-8-sig"
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding).read()


def _encoding(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "utf-8-sig" if b"\0" in data else "cp1252"
    return "utf-8-sig"


def write_private_file(path: Path, text: str, *, replace: bool = True) -> bool:
    """Write a whole file or nothing, readable by its owner alone. False: without `replace`, another was there. Raises
    OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if replace:
            temporary.replace(path)
            return True
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def write_output(
    path: str | Path, text: str, *, replace: bool = True, hint: str = "name a writable file."
) -> None:
    """The same for a file that the user has named. Raises UsageError.

    A link stays, and its file is replaced. What is no file (/dev/stdout, a pipe) is written into: renaming over it would
    take a device from the whole machine.
    """
    try:
        target = Path(os.path.realpath(path))
        if _is_written_into(Path(path)):
            Path(path).write_text(text, encoding="utf-8")
        else:
            write_private_file(target, text, replace=replace)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}.", hint=hint) from error


def check_output(path: str | Path, *, hint: str = "name a writable file.") -> None:
    """Raise UsageError where `write_output` would, as far as that can be told before minutes of work; writes nothing."""
    target = Path(os.path.realpath(path))
    number = 0
    if target.is_dir():
        number = errno.EISDIR
    elif not target.parent.exists():
        number = errno.ENOENT
    elif not target.parent.is_dir():
        number = errno.ENOTDIR
    elif not _is_written_into(Path(path)) and not os.access(target.parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise UsageError(f"{str(path)!r} cannot be written: {os.strerror(number)}.", hint=hint)


def _is_written_into(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing is there, or the writing says what is wrong
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def working_directory() -> Path:
    """Raises UsageError where somebody has deleted it: torch cannot be loaded from there either."""
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UsageError(
            "The working directory has been deleted.", hint="change into one that is there."
        ) from error


def may_be_there(path: Path) -> bool:
    """Whether something of that name is there, or nobody can tell for want of permission: then opening it says why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True
