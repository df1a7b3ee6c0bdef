"""`chairlift cache`: lists what is saved in a directory of prompts, and removes it."""

import sys
import time

from chairlift.disk.config import CacheConfig
from chairlift.disk.root import CacheSummary, PrefixRoot
from chairlift.errors import ConfigurationError, sized

_SHOWN_ID = 8  # digits, which tell some caches apart


def run(config: CacheConfig) -> int:
    """Lists the caches of a directory, or removes them. ConfigurationError if it cannot be read or written."""
    root = PrefixRoot(config.directory.expanduser())
    try:
        found = [each for each in root.summarize() if each.identity.startswith(config.only or "")]
        if not found and config.only is not None:
            raise ConfigurationError(f"no cache in {root.path} has an id that begins with {config.only}")
        for each in found:
            if config.clear:
                root.remove(each.identity)
            sys.stdout.write(_described(each) + "\n")
    except OSError as error:
        raise ConfigurationError(f"{root.path}: {error.strerror}") from error
    num_bytes = sum(each.num_bytes for each in found)
    verb = "removed" if config.clear else "saved"
    sys.stdout.write(f"{sized(num_bytes)} {verb} in {len(found)} {'cache' if len(found) == 1 else 'caches'}\n")
    return 0


def _described(each: CacheSummary) -> str:
    """One line: its id, size, number of files and last use, and what it is of."""
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_at)) if each.num_files else "never used"
    what = ", ".join(filter(None, (each.facts.get(name) for name in ("model", "numbers", "arithmetic", "version"))))
    return f"{each.identity[:_SHOWN_ID]}  {sized(each.num_bytes)}  {each.num_files} files  {used}  {what or 'unknown'}"
