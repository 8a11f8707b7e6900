"""InkML files."""

import numpy as np
import pytest

from stretto.data import PARTS, NoTargets
from stretto.data.ink import line_features
from stretto.data.inkml import read_inkml
from stretto.data.lines import part_of
from stretto.errors import StrettoError

NAMESPACE = ' xmlns="http://www.w3.org/2003/InkML"'
STROKES = [np.array([[10.0, 40.0], [12.5, 20.0], [14.0, 40.0]]), np.array([[11.0, 30.0], [13.0, 30.0]])]
TRACES = "<trace>10 40, 12.5 20, 14 40</trace><trace>11 30,13 30</trace>"
LAUGHS = '<!DOCTYPE ink [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'


def write(path, inside, *, root=f"ink{NAMESPACE}", before=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}<{root}>{inside}</{root.split()[0]}>", encoding="utf-8")
    return path


@pytest.mark.parametrize("root", ["ink", f"ink{NAMESPACE}"])
def test_one_file_is_one_sequence(tmp_path, root):
    path = write(tmp_path / "word.inkml", f'<annotation type="truth"> Añ </annotation>{TRACES}', root=root)
    data = read_inkml(path)
    assert len(data) == 1
    assert data.name == "word"
    assert data[0].target == "Añ"
    np.testing.assert_array_equal(data[0].features_TF.numpy(), line_features(STROKES))
    assert "split by file name" in data.notes[0]


def test_a_prefixed_namespace_is_the_same(tmp_path):
    path = tmp_path / "word.inkml"
    path.write_text(
        '<i:ink xmlns:i="http://www.w3.org/2003/InkML"><i:trace>10 40, 12.5 20, 14 40</i:trace>'
        "<i:trace>11 30,13 30</i:trace></i:ink>",
        encoding="utf-8",
    )
    np.testing.assert_array_equal(read_inkml(path)[0].features_TF.numpy(), line_features(STROKES))


@pytest.mark.parametrize(
    ("channels", "points"),
    [
        ('<channel name="X" type="decimal"/><channel name="Y" type="decimal"/>', "10 40, 12.5 20"),
        ('<channel name="T"/><channel name="Y"/><channel name="F"/><channel name="X"/>', "0 40 T 10, 1 20 F 12.5"),
        ('<channel name="X"/><channel name="Y" orientation="-ve"/>', "10 -40,12.5 -20"),
        ('<channel name="X" orientation="+ve"/><channel name="Y"/>', "1e1 +40.,1.25E+1 2.0e1"),
    ],
)
@pytest.mark.parametrize("place", ["{}", "<definitions><context>{}</context></definitions>"])
def test_x_and_y_are_found_by_name(tmp_path, channels, points, place):
    trace_format = place.format(f"<traceFormat>{channels}</traceFormat>")
    data = read_inkml(write(tmp_path / "word.inkml", f"{trace_format}<trace>{points}</trace>"))
    np.testing.assert_array_equal(data[0].features_TF.numpy(), line_features([np.array([[10.0, 40.0], [12.5, 20.0]])]))


def test_groups_count_but_definitions_and_empty_traces_do_not(tmp_path):
    inside = (
        "<definitions><trace>0 0, 900 900</trace></definitions>"
        "<traceGroup><traceGroup><trace>10 40, 12.5 20, 14 40</trace></traceGroup><trace> </trace>"
        "<trace>11 30<!-- here -->,13 30</trace></traceGroup>"
    )
    data = read_inkml(write(tmp_path / "word.inkml", inside))
    np.testing.assert_array_equal(data[0].features_TF.numpy(), line_features(STROKES))


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ('<annotation type="label">a</annotation><annotation type="normalizedLabel">b</annotation>', "a"),
        ('<annotation type="normalizedLabel">b</annotation><annotation type="truth">c</annotation>', "c"),
        ('<annotation type="truth"> </annotation><annotation type="transcription">d</annotation>', "d"),
        (
            '<annotation type="writer">w</annotation><traceGroup><annotation type="truth">e</annotation></traceGroup>',
            "e",
        ),
        (
            '<annotation type="label">f</annotation><traceGroup><annotation type="truth">g</annotation></traceGroup>',
            "f",
        ),
    ],
)
def test_the_transcript_is_the_first_annotation_that_tells(tmp_path, inside, text):
    assert read_inkml(write(tmp_path / "word.inkml", inside + TRACES))[0].target == text


def test_a_folder_is_split_by_file_name(tmp_path):
    names = [f"w{number:03}" for number in range(60)]
    for number, name in enumerate(names):
        write(tmp_path / f"{number % 3}" / f"{name}.inkml", f'<annotation type="truth">{name}</annotation>{TRACES}')
    data = read_inkml(tmp_path)
    assert data.name == tmp_path.name
    texts = [data[index].target for index in range(len(data))]
    assert sorted(texts) == names
    assert [PARTS[number] for number in data.split_N] == [part_of(text) for text in texts]
    assert set(data.split_N.tolist()) == {0, 1, 2}


def test_a_part_may_stay_empty(tmp_path):
    names = [name for name in (f"w{number}" for number in range(60)) if part_of(name) != "test"]
    for name in names:
        write(tmp_path / f"{name}.inkml", TRACES)
    data = read_inkml(tmp_path)
    assert isinstance(data.targets, NoTargets)
    assert [PARTS[number] for number in data.split_N] == [part_of(name) for name in sorted(names)]
    assert len(data.notes) == 1


def test_transcripts_are_for_all_files_or_none(tmp_path):
    write(tmp_path / "a.inkml", f'<annotation type="truth">a</annotation>{TRACES}')
    write(tmp_path / "b.inkml", TRACES)
    with pytest.raises(StrettoError, match=r"b\.inkml' has no transcript"):
        read_inkml(tmp_path)


@pytest.mark.parametrize(
    "points", ["1125 18432,'23 '43,\"7 \"-8,3 -5", "10 20,'3 4", '10 20,"3 4', "!10 !20", "10 20, 5 '6"]
)
def test_compressed_traces_are_refused(tmp_path, points):
    with pytest.raises(StrettoError, match=r"word\.inkml' has a trace in a compressed form.*plain decimals"):
        read_inkml(write(tmp_path / "word.inkml", f"<trace>{points}</trace>"))


@pytest.mark.parametrize(
    "points", ["10 20, 30", "10 20,", "10 20, a b", "10 nan, 1 1", "1_0 20", "#A0 #FF", "10-5", "* ?", "٣ 4"]
)
def test_points_that_are_no_decimals_are_refused(tmp_path, points):
    with pytest.raises(StrettoError, match=r"word\.inkml' has the point .* no plain decimal"):
        read_inkml(write(tmp_path / "word.inkml", f"<trace>{points}</trace>"))


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ("", "has no strokes"),
        ("<trace> </trace>", "has no strokes"),
        ('<traceFormat><channel name="X"/><channel name="F"/></traceFormat><trace>1 2</trace>', "not X and Y"),
        (
            '<traceFormat><channel name="X"/><channel name="Y"/></traceFormat>'
            '<traceFormat><channel name="Y"/><channel name="X"/></traceFormat><trace>1 2</trace>',
            "2 different trace formats",
        ),
        ('<trace type="penUp">1 2</trace>', "pen-up"),
        ('<trace>1 2</trace><trace continuation="end">1 2</trace>', "continues another"),
        ("<trace>0 0, 1e300 1</trace>", "the pen travels"),
        ("<trace>0 0, 1e999 1</trace>", "the pen travels"),
    ],
)
def test_ink_that_cannot_be_used_names_its_file(tmp_path, inside, told):
    write(tmp_path / "good.inkml", TRACES)
    write(tmp_path / "word.inkml", inside)
    with pytest.raises(StrettoError, match=rf"word\.inkml.*{told}"):
        read_inkml(tmp_path)


@pytest.mark.parametrize("content", [b"", b"<ink>", b"<ink><trace>1 2</ink>", b"\x00\x01", b"<ink>\xff</ink>"])
def test_malformed_xml_is_refused(tmp_path, content):
    (tmp_path / "word.inkml").write_bytes(content)
    with pytest.raises(StrettoError, match=r"word\.inkml' is damaged or no plain XML"):
        read_inkml(tmp_path)


@pytest.mark.parametrize("encoding", ["klingon", "utf-32", "shift_jis"])
def test_an_encoding_that_is_not_known_is_refused(tmp_path, encoding):
    (tmp_path / "word.inkml").write_text(f'<?xml version="1.0" encoding="{encoding}"?><ink/>', encoding="ascii")
    with pytest.raises(StrettoError, match=r"word\.inkml' is damaged or no plain XML"):
        read_inkml(tmp_path)


def test_another_root_is_refused(tmp_path):
    write(tmp_path / "page.inkml", "", root="html")
    with pytest.raises(StrettoError, match=r"page\.inkml' has the root 'html'"):
        read_inkml(tmp_path)


def test_a_billion_laughs_are_refused(tmp_path):
    inside = f'<annotation type="truth">&c;</annotation>{TRACES}'
    with pytest.raises(StrettoError, match="entities are never read"):
        read_inkml(write(tmp_path / "word.inkml", inside, before=LAUGHS))


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE ink [<!ENTITY secret SYSTEM "{}">]>',
        '<!DOCTYPE ink [<!ENTITY % all SYSTEM "{}"> %all;]>',
        '<!DOCTYPE ink SYSTEM "{}">',
    ],
)
def test_external_entities_are_refused(tmp_path, doctype):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret", encoding="utf-8")
    text = "&secret;" if "ENTITY secret" in doctype else "plain"
    inside = f'<annotation type="truth">{text}</annotation>{TRACES}'
    path = write(tmp_path / "word.inkml", inside, before=doctype.format(secret.as_uri()))
    with pytest.raises(StrettoError, match="entities are never read") as caught:
        read_inkml(path)
    assert "the secret" not in str(caught.value)


def test_a_folder_without_ink_and_a_missing_file_are_told(tmp_path):
    with pytest.raises(StrettoError, match=r"there is no \.inkml file below"):
        read_inkml(tmp_path)
    with pytest.raises(StrettoError, match=r"could not read '.*none\.inkml'"):
        read_inkml(tmp_path / "none.inkml")
