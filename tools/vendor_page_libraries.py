"""Write the libraries that the page uses, chairlift/api/page_files/vendor/, from their npm packages.

python tools/vendor_page_libraries.py [--check]

Needs npm. With `--check` it compares what is there instead, without it. To renew a library, change its version here;
the tool says which hashes the new one has. Refuses packages and files with other hashes than those below, and writes
nothing then.
"""

import base64
import hashlib
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

VENDOR = Path(__file__).resolve().parent.parent / "chairlift/api/page_files/vendor"
LICENSES = "LICENSES.txt"
_SOURCE_MAP = b"//# sourceMappingURL="  # browsers would ask for a file that is not shipped


@dataclass(frozen=True, slots=True)
class Library:
    """A package of npm, and the script of it that the page loads."""

    name: str
    version: str
    integrity: str  # the package's SHA-512, as npm writes it
    script: str = ""  # empty: another library's script includes it, so that its licence is shipped
    saved_as: str = ""
    sha256: str = ""  # of the file that is shipped

    @property
    def title(self) -> str:
        """The name and the version, as npm takes them."""
        return f"{self.name}@{self.version}"


LIBRARIES = (
    Library(
        "markdown-it",
        "15.0.3",
        "sha512-+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        "dist/browser/markdown-it.esm.min.mjs",
        "markdown-it.js",
        "66743187094a0f1e03b0ebe3e9f21ff7f026a9740325cbe81e19808d29610d7e",
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        "es/highlight.min.js",
        "highlight.js",
        "6e44aa04cd503b51f6dbdcd6727fdac2ab744ec4ab81d3f8c02bc290693fddd1",
    ),
    # What the script of markdown-it includes.
    Library(
        "entities",
        "8.1.0",
        "sha512-kxL7msIffSuh9aaFAMD7rxAIuTRMAHMeBtgHW2yUdWw732ZNh4MehkF2gdjvtdmikkaIP9bFDDJOPlsvm7avrA==",
    ),
    Library(
        "linkify-it",
        "6.1.0",
        "sha512-wJ/TwpSDTLepCrQoYWYIExIKg5Zchex2Nn5yk2mFnB+6PtdkHtyLx742md9csRjjOnGkKIS/RrbY7l8D6gT9Vw==",
    ),
    Library(
        "mdurl",
        "2.1.0",
        "sha512-1+HBaOx0zi/dQWht8rNv9MYf9qqpqL/kxI0hXImU6Y547zM6Sni8BQibt7ifgMcYtQg41ao3Ivd6cnSM86inpg==",
    ),
    Library(
        "punycode.js",
        "2.3.1",
        "sha512-uxFIHU0YlHYhDQtV4R9J6a52SLx28BCjT+4ieh7IGbgwVJWO+km431c4yRlREUAsAmt/uMjQUyQHNEPf0M39CA==",
    ),
    Library(
        "uc.micro",
        "3.0.0",
        "sha512-U3PppEkleoTnIfi8BozMx3yju3qc/L6SwqWo2Sw+54PX+PX0q9I+r1Um5HCmqD7n9VDX5/v3vQH/AjA6deDdtw==",
    ),
)


def main() -> int:
    """Writes the scripts and their licences, or checks them. Returns 1 with a reason where a hash differs."""
    return check() if "--check" in sys.argv[1:] else write()


def check() -> int:
    """Compares the files that are there with the hashes of scripts, and the licences with the list of libraries."""
    expected = {library.saved_as: library.sha256 for library in LIBRARIES if library.script}
    files = {path.name: path.read_bytes() for path in VENDOR.iterdir()}
    licenses = files.pop(LICENSES).decode()
    found = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    wrong += [library.title for library in LIBRARIES if f"{library.title}\n" not in licenses]
    if wrong:
        print(f"not what tools/vendor_page_libraries.py writes: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def write() -> int:
    """Writes the scripts and their licences, unless a hash differs."""
    files: dict[str, bytes] = {}
    licenses = []
    with TemporaryDirectory() as folder:
        for library in LIBRARIES:
            package = fetch(library, Path(folder))
            found = integrity_of(package.read_bytes())
            if found != library.integrity:
                return refuse(f"the package {library.title}", found)
            with tarfile.open(package) as archive:
                licenses.append(f"{library.title}\n\n{read(archive, license_of(archive)).decode().strip()}\n")
                if library.script:
                    files[library.saved_as] = without_source_map(read(archive, f"package/{library.script}"))
                    found = hashlib.sha256(files[library.saved_as]).hexdigest()
                    if found != library.sha256:
                        return refuse(f"{library.script} of {library.title}", found)
    files[LICENSES] = f"\n{'=' * 80}\n\n".join(licenses).encode()
    VENDOR.mkdir(exist_ok=True)
    for name, content in files.items():
        (VENDOR / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes")
    return 0


def fetch(library: Library, folder: Path) -> Path:
    """Downloads the package into that folder."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), library.title]
    return folder / subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def integrity_of(content: bytes) -> str:
    """Computes the SHA-512 of a package as npm writes it."""
    return f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"


def read(archive: tarfile.TarFile, name: str) -> bytes:
    """Reads a file of a package. KeyError if it is not there."""
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file.read()


def license_of(archive: tarfile.TarFile) -> str:
    """Finds the licence of a package."""
    return next(name for name in archive.getnames() if name.startswith("package/LICENSE"))


def without_source_map(script: bytes) -> bytes:
    """Removes the comment that names a script's map."""
    lines = [line for line in script.splitlines() if not line.startswith(_SOURCE_MAP)]
    return b"\n".join(lines).strip() + b"\n"


def refuse(what: str, found: str) -> int:
    """Says which hash a thing has instead of the expected one, and returns an exit code."""
    print(f"{what} has another hash than expected: {found}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
