"""Files that a stranger may send as an image, drawn from a seed, with the pixels that a sound one must give."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from scripts.goldens.pictures import picture
from tests.hostile_bytes import flipped, spliced

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "RGBA", "L", "CMYK", "P", "I;16", "F", "LAB", "YCbCr"),
}


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def in_mode(pixels: np.ndarray, mode: str) -> Image.Image:
    """The picture in a mode of Pillow; grey ones from its first channel."""
    if mode == "I;16":
        return Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(pixels[:, :, 0].astype(np.float32))
    image = Image.fromarray(pixels)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(pixels[:, :, 1]))
        return image.convert(mode)
    if mode == "P":
        return image.quantize(50)
    if mode == "LAB":
        return Image.frombytes("LAB", image.size, image.tobytes())
    return image.convert(mode)


def png(width: int, height: int, data: bytes, *, depth: int = 8, colour: int = 2, chunks: bytes = b"") -> bytes:
    """A PNG whose header and data are what they are said to be, sound or not."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunks + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bombs() -> dict[str, bytes]:
    """Small files that would become large: of pixels, of text, of scans, of a tile."""
    rows = zlib.compress(bytes(30000 * 100), 9)
    small = saved(Image.new("RGB", (16, 16)), "WEBP", lossless=True)
    huge_vp8l = bytearray(small)
    huge_vp8l[21:25] = (0x3FFF | 0x3FFF << 14).to_bytes(4, "little")
    alpha = bytearray(saved(Image.new("RGBA", (16, 16), (1, 2, 3, 4)), "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"))
    alpha[24:30] = b"\xfe\x3f\x00\xfe\x3f\x00"
    gif = bytearray(saved(Image.new("L", (16, 16)), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    wide_frame = bytearray(saved(Image.new("L", (16, 16)), "GIF"))
    place = wide_frame.index(b",", 13 + 3 * 2)
    wide_frame[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    text = zlib.compress(bytes(20 << 20), 9)
    jpeg = saved(Image.fromarray(picture(16, 16, 0)), "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return {
        "png_pixels": png(60000, 60000, rows),
        "png_just_over": png(8193, 8192, rows),
        "png_text": png(1, 1, zlib.compress(bytes(4)), chunks=chunk(b"zTXt", b"a\0\0" + text)),
        "png_profile": png(1, 1, zlib.compress(bytes(4)), chunks=chunk(b"iCCP", b"a\0\0" + text)),
        "webp_vp8l": bytes(huge_vp8l),
        "webp_vp8x": bytes(alpha),
        "gif_screen": bytes(gif),
        "gif_frame": bytes(wide_frame),
        "tiff_pixels": tiff({256: 60000, 257: 60000, 259: 8}),
        "tiff_tile": tiff({256: 16, 257: 16, 259: 8, 322: 40000, 323: 40000, 324: 8, 325: 100}),
        "tiff_no_strips": tiff({256: 8000, 257: 8000, 259: 1}),
        "jpeg_scans": jpeg[:-2] + scan * 3000 + b"\xff\xd9",
        "jpeg_pixels": _jpeg_of_size(65500, 65500),
        "bmp_pixels": b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0),
    }


def tiff(tags: dict[int, int]) -> bytes:
    """A TIFF of one directory of 32-bit values and no pixels; RGB of 8 bits unless the tags say something else."""
    tags = {258: 8, 262: 1, 277: 1, 278: 16} | tags
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + bytes(100)


def _jpeg_of_size(width: int, height: int) -> bytes:
    content = bytearray(saved(Image.new("RGB", (16, 16)), "JPEG"))
    place = content.index(b"\xff\xc0")
    content[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def hostile_file(random: np.random.Generator) -> tuple[bytes, np.ndarray | None]:
    """A file and, if it is sound, its pixels (of lossy kinds None); sound and not in turn by chance."""
    kind = str(random.choice(KINDS))
    mode = str(random.choice(MODES[kind]))
    height, width = (int(n) for n in random.integers(1, 60, 2))
    pixels = picture(height, width, int(random.integers(1 << 30)))
    options = {"PNG": {}, "WEBP": {"lossless": True}, "JPEG": {"progressive": bool(random.integers(2))}}.get(kind, {})
    if kind == "TIFF" and mode not in ("F", "I;16", "LAB", "YCbCr"):
        options = {"compression": str(random.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"]))}
    content = saved(in_mode(pixels, mode), kind, **options)
    what = random.integers(8)
    if what == 0:
        return content[: int(random.integers(len(content)))], None
    if what <= 3:
        return flipped(content, random, 60), None
    if what == 4:
        return spliced(content, random), None
    if what == 5:
        return b"".join([bytes(random.integers(0, 256, 40, dtype=np.uint8)), content]), None
    if what == 6:
        return list(BOMBS.values())[int(random.integers(len(BOMBS)))], None
    lossless = mode == "RGB" and kind != "JPEG"
    return content, pixels if lossless else None


BOMBS = bombs()
