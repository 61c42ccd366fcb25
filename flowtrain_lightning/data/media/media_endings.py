"""Endings of files of media, by what they hold."""

from __future__ import annotations

MEDIA_ENDINGS = {
    "image": (
        *("avif", "bmp", "gif", "heic", "heif", "jfif", "jp2", "jpe", "jpeg", "jpg", "mpo", "pbm", "pgm", "png", "pnm"),
        *("ppm", "tga", "tif", "tiff", "webp"),
    ),
    "video": ("asf", "avi", "flv", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "ogv", "webm", "wmv"),
    "audio": ("aac", "flac", "m4a", "mp3", "oga", "ogg", "opus", "wav"),
}
"""Kind of media -> endings of its files, in small letters. What cannot be decoded is named when it is measured."""
