"""Files of films for tests: written by PyAV, and damaged."""

import io
import struct

import numpy as np

KINDS = {  # format, codec and pixels of a file
    "mp4": ("mp4", "libx264", "yuv420p"),
    "mov": ("mov", "mjpeg", "yuvj420p"),
    "webm": ("webm", "libvpx-vp9", "yuv420p"),
    "mkv": ("matroska", "libx264", "yuv420p"),
    "avi": ("avi", "mpeg4", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}
# A display matrix by which players turn a film to the right by a quarter.
UPRIGHT = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
TURNED = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)


def film_file(frames: np.ndarray, kind: str = "mp4", fps: int = 10, begins: int = 250) -> bytes:
    """A file of frames uint8 [N, H, W, 3]. begins: after how many, at most, a decoder can begin anew."""
    import av  # pyright: ignore[reportMissingImports]

    container, codec, pixels = KINDS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as made:
        stream = made.add_stream(codec, rate=fps, options={"g": str(begins)})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            made.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        made.mux(stream.encode())
    return file.getvalue()


def head_first(content: bytes) -> bytes:
    """An MP4 whose box of tables stands before its data."""
    at = content.rindex(b"moov") - 4
    boxes, moov = content[:at], bytearray(content[at:])
    start = moov.index(b"stco") + 8
    for entry in range(start + 4, start + 4 + 4 * int.from_bytes(moov[start : start + 4], "big"), 4):
        moved = int.from_bytes(moov[entry : entry + 4], "big") + len(moov)
        moov[entry : entry + 4] = moved.to_bytes(4, "big")
    data = boxes.index(b"mdat") - 4
    return boxes[:data] + bytes(moov) + boxes[data:]


def steps(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frames of one grey each, brighter and brighter, with a dark left half."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[:, :, width // 2 :] = (40 + np.arange(count) * 200 // count)[:, None, None, None]
    return frames
