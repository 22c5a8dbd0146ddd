"""Pictures, the same bytes every time. What is drawn has been computed elsewhere."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from aurora.io.files import write_bytes
from aurora.types.arrays import FloatArray

UNDATED = {"svg": {"Date": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}  # metadata by suffix


def canvas(width: float, height: float) -> Any:
    """Returns a matplotlib figure that needs no screen.

    Args:
        width, height: size in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_picture(drawn: Any, folder: Path, name: str, suffixes: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Writes a picture as NAME.svg and so on. Returns the paths.

    Args:
        drawn: a matplotlib figure.
        folder: folder to write to.
        name: name of the files, without suffix.
        suffixes: kinds of files: "svg", "png", "pdf".
    """
    import matplotlib

    written = []
    for suffix in suffixes:
        picture = BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            drawn.savefig(picture, format=suffix, dpi=150, metadata=UNDATED[suffix])
        path = folder / f"{name}.{suffix}"
        write_bytes(path, picture.getvalue())
        written.append(path)
    return written


def draw_maps(
    values_RC: dict[str, FloatArray],
    rows: Sequence[str],
    columns: Sequence[str],
    axes: tuple[str, str],
    folder: Path,
    name: str,
) -> list[Path]:
    """Draws heat maps side by side and writes them as SVG and PNG.

    Args:
        values_RC: by the map's title, (R, C) values.
        rows, columns: labels of the R rows and the C columns.
        axes: labels of the vertical and the horizontal axis.
        folder, name: as in `save_picture`.

    Returns:
        Paths of the files written.
    """
    drawn = canvas(max(3.2, 0.7 * len(columns) + 1.6) * len(values_RC), max(2.4, 0.5 * len(rows) + 1.6))
    for number, (title, value_RC) in enumerate(values_RC.items()):
        plot = drawn.add_subplot(1, len(values_RC), number + 1)
        picture = plot.imshow(value_RC, aspect="auto", origin="lower", cmap="viridis")
        plot.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
        plot.set_yticks(range(len(rows)), rows)
        plot.set_xlabel(axes[1])
        plot.set_ylabel(axes[0])
        plot.set_title(title, fontsize="medium")
        for (row, column), value in _cells(value_RC):
            plot.text(column, row, f"{value:.2f}", ha="center", va="center", color="white", fontsize="x-small")
        drawn.colorbar(picture, ax=plot)
    return save_picture(drawn, folder, name)


def _cells(value_RC: FloatArray) -> list[tuple[tuple[int, int], float]]:
    rows, columns = value_RC.shape
    return [((row, column), float(value_RC[row, column])) for row in range(rows) for column in range(columns)]
