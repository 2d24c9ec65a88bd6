"""The small files in which the kernel shows its numbers: in /proc and in /sys/fs/cgroup."""


def read(path: str) -> str:
    """What is in it, without white space around it; "" where there is none, or it must not be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  a scrape reads fifty; Path takes twice as long
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
