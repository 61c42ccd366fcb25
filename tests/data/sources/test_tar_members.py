"""A shard that was cut or damaged anywhere is refused: it never has fewer records without a word."""

import io
import json
import random
import shutil
import subprocess
import tarfile

import pytest

from flowtrain_lightning.data import DataError, TarShard
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.data.png import drawn_png
from tests.data.shards import write_tar

BLOCK, RECORD = 512, 10_240


def members(count=4, name="{:06}"):
    """The files of records with an image each, of several blocks."""
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "It is." * 100}]
    found = {}
    for number in range(count):
        picture, _ = drawn_png(random.Random(number))
        found[f"{name.format(number)}.json"] = json.dumps({"messages": turns}).encode()
        found[f"{name.format(number)}.png"] = picture
    return found


def read(path):
    """What is in each record."""
    store = TarShard(path)
    records = store.records(0, locations_of(store))
    return [(record.id, record.turns, [image.content for image in record.images]) for record in records]


def whole_or_refused(path, content, expected):
    """Whether a shard of these bytes is refused; else it must have the records that are expected."""
    path.write_bytes(content)
    try:
        found = read(path)
    except DataError as error:
        said = str(error)
        assert said.startswith(str(path)), said
        return True
    assert [(name, turns) for name, turns, _ in found] == [(name, turns) for name, turns, _ in expected]
    return False


def formats(tmp_path):
    """A shard of each form that tar files come in."""
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for name in ("{:06}", "größe {:06}", "long" * 40 + "/{:06}"):
            if kind == tarfile.USTAR_FORMAT and "long" in name:
                continue
            yield write_tar(tmp_path / "whole.tar", members(name=name), format=kind)


def test_a_shard_that_was_cut_at_any_block_is_refused(tmp_path):
    for path in formats(tmp_path):
        whole, expected = path.read_bytes(), read(path)
        end = len(whole.rstrip(b"\0"))
        for place in range(0, len(whole), BLOCK):
            refused = whole_or_refused(tmp_path / "cut.tar", whole[:place], expected)
            assert refused == (place < -(-end // BLOCK) * BLOCK + 2 * BLOCK), place


FULL = pytest.mark.full


@pytest.mark.parametrize("blocks", [2, *(pytest.param(blocks, marks=FULL) for blocks in (1, 3, 7))])
def test_a_shard_of_which_any_stretch_is_zeros_is_refused_or_has_all_records(tmp_path, blocks):
    for path in formats(tmp_path):
        whole, expected = path.read_bytes(), read(path)
        end = -(-len(whole.rstrip(b"\0")) // BLOCK) * BLOCK
        for place in range(0, end - blocks * BLOCK, BLOCK):
            zeros = bytes(blocks * BLOCK)
            whole_or_refused(tmp_path / "zeros.tar", whole[:place] + zeros + whole[place + len(zeros) :], expected)


def test_a_shard_that_ends_with_more_zeros_than_any_writer_adds_is_refused(tmp_path):
    whole = write_tar(tmp_path / "whole.tar", members(40)).read_bytes()
    end = -(-len(whole.rstrip(b"\0")) // BLOCK) * BLOCK
    expected = read(tmp_path / "whole.tar")
    for place in range(0, end - RECORD, 3 * BLOCK):
        assert whole_or_refused(tmp_path / "zeros.tar", whole[:place] + bytes(len(whole) - place), expected), place


def test_a_header_of_which_a_byte_has_changed_is_refused_or_means_the_same(tmp_path):
    chance = random.Random(0)
    for path in formats(tmp_path):
        whole, expected = path.read_bytes(), read(path)
        for _ in range(12):
            content, place = bytearray(whole), chance.randrange(len(whole))
            content[place // BLOCK * BLOCK + place % 200] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            try:
                assert len(read(path)) == len(expected)
            except DataError as error:
                said = str(error)
                assert said.startswith(str(path)), said


def test_members_in_any_order_are_the_same_records_or_refused(tmp_path):
    files = members(3)
    expected = sorted(read(write_tar(tmp_path / "whole.tar", files)))
    chance, verdicts = random.Random(0), []
    for _ in range(30):
        names = chance.sample(list(files), len(files))
        path = write_tar(tmp_path / "mixed.tar", {name: files[name] for name in names})
        try:
            assert sorted(read(path)) == expected
            verdicts.append("read")
        except DataError as error:
            said = str(error)
            assert "do not follow each other" in said
            verdicts.append("refused")
    assert set(verdicts) == {"read", "refused"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.json", "a.png", "a.json"], r"record 'a' has two files that end with '\.json'"),
        (["a.json", "a.png", "a.PNG"], r"record 'a' has two files that end with '\.png'"),
        (["0.png", "1.png", "0.txt", "1.txt"], r"files of its record '0' do not follow each other: \.txt and \.png"),
    ],
)
def test_a_record_that_would_lose_a_file_is_refused(tmp_path, names, words):
    with tarfile.open(tmp_path / "d.tar", "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=words):
        locations_of(TarShard(tmp_path / "d.tar"))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_member_that_is_only_a_link_is_refused(tmp_path, kind):
    with tarfile.open(write_tar(tmp_path / "d.tar", members(1)), "a") as tar:
        link = tarfile.TarInfo("000001.png")
        link.type, link.linkname = kind, "000000.png"
        tar.addfile(link)
    with pytest.raises(DataError, match=r"member '000001\.png' is a link to another one.*--dereference"):
        locations_of(TarShard(tmp_path / "d.tar"))


def test_shards_put_one_behind_another_are_refused_and_joined_by_tar_are_read(tmp_path):
    first, second = (write_tar(tmp_path / f"{number}.tar", members(2)) for number in range(2))
    expected = read(first) + read(second)
    (tmp_path / "cat.tar").write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(DataError, match="several tar files were put one behind another"):
        read(tmp_path / "cat.tar")
    subprocess.run(["tar", "-A", "-f", str(first), str(second)], check=True, timeout=60)
    assert read(first) == expected


def test_every_usual_writer_of_shards_is_read(tmp_path):
    files = members(3, name="a b/größe-" + "x" * 120 + "{:06}")
    expected = read(write_tar(tmp_path / "python.tar", files))
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    for number, settings in enumerate(
        (["--format=gnu"], ["--format=pax"], ["--format=pax", "--xattrs"], ["-b", "1"], ["--label=shards"])
    ):
        path = tmp_path / f"{number}.tar"
        subprocess.run(
            ["tar", "cf", path, *settings, "--sort=name", "a b"], cwd=tmp_path / "in", check=True, timeout=60
        )
        assert read(path) == expected, settings
    shutil.copy(tmp_path / "0.tar", tmp_path / "more.tar")
    subprocess.run(
        ["tar", "rf", tmp_path / "more.tar", "more.txt"], cwd=_with(tmp_path, "more.txt"), check=True, timeout=60
    )
    assert len(read(tmp_path / "more.tar")) == 4
    bare = (tmp_path / "python.tar").read_bytes().rstrip(b"\0")  # as Go and Rust write it: without padding
    (tmp_path / "bare.tar").write_bytes(bare + bytes(-len(bare) % BLOCK + 2 * BLOCK))
    assert read(tmp_path / "bare.tar") == expected


def _with(folder, name):
    (folder / name).write_text("words")
    return folder


def test_a_shard_that_cannot_be_compared_is_refused_where_a_record_has_changed(tmp_path):
    path = write_tar(tmp_path / "d.tar", members(2))
    store = TarShard(path)
    locations = locations_of(store)
    changed = io.BytesIO(path.read_bytes())
    changed.seek(int(locations[1, 0]) + 2 * BLOCK)
    changed.write(bytes(3 * BLOCK))
    path.write_bytes(changed.getvalue())
    with pytest.raises(DataError, match=r"000001|changed"):
        store.records(1, locations[1:])


@pytest.mark.parametrize("ending", ["jfif", "jpe", "mpo", "heic", "pbm", "JPG"])
def test_a_picture_of_any_ending_is_part_of_its_record(tmp_path, ending):
    path = write_tar(tmp_path / "a.tar", {"0.txt": b"a cat", f"0.{ending}": b"pixels"})
    ((_, _, pictures),) = read(path)
    assert pictures == [b"pixels"]
