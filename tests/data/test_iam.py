"""The IAM-OnDB layout."""

import numpy as np
import pytest

from stretto.data import PARTS
from stretto.data.iam import read_iam
from stretto.data.ink import line_features
from stretto.data.lines import part_of
from stretto.errors import StrettoError

STROKES = [np.array([[100.0, 400.0], [120.0, 300.0], [140.0, 410.0]]), np.array([[150.0, 350.0]])]


def session(strokes):
    inside = "".join(
        f'<Stroke colour="black" start_time="0" end_time="1">{"".join(map(point, stroke))}</Stroke>'
        for stroke in strokes
    )
    return (
        '<?xml version="1.0" encoding="ISO-8859-1"?><WhiteboardCaptureSession><WhiteboardDescription/>'
        f"<StrokeSet>{inside}</StrokeSet></WhiteboardCaptureSession>"
    )


def point(xy):
    return f'<Point x="{int(xy[0])}" y="{int(xy[1])}" time="769.05"/>'


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def strokes_path(folder, sheet, number):
    form = sheet.rstrip("uwxyz")
    return folder / "lineStrokes" / form[:3] / form / f"{sheet}-{number:02}.xml"


def ascii_path(folder, sheet):
    form = sheet.rstrip("uwxyz")
    return folder / "ascii" / form[:3] / form / f"{sheet}.txt"


def put_sheet(folder, sheet, texts):
    for number in range(1, len(texts) + 1):
        put(strokes_path(folder, sheet, number), session([stroke + number for stroke in STROKES]))
    lines = "\n\n".join(texts) if len(texts) > 2 else "\n".join(texts)
    put(ascii_path(folder, sheet), f"OCR:\n\nother words\nof the page\n\nCSR:\n\n{lines}\n")


def test_lines_have_ink_and_the_text_under_csr(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["A move to", "stop, Mr.", "Gaitskell"])
    put_sheet(tmp_path, "a01-020", ["of peers"])
    data = read_iam(tmp_path)
    assert [data[index].target for index in range(4)] == ["A move to", "stop, Mr.", "Gaitskell", "of peers"]
    np.testing.assert_allclose(data[0].features_TF.numpy(), line_features(STROKES), atol=1e-5)
    assert data.name == tmp_path.name
    assert "no form is in two parts" in data.notes[0]


def test_a_line_number_points_into_the_text(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one", "two", "three"])
    strokes_path(tmp_path, "a01-000u", 2).unlink()
    data = read_iam(tmp_path)
    assert [data[0].target, data[1].target] == ["one", "three"]


def test_no_form_is_in_two_parts(tmp_path):
    forms = [f"a{number // 10:02}-{number:03}" for number in range(50)]
    for form in forms:
        put_sheet(tmp_path, f"{form}u", [f"{form} first", f"{form} second"])
        put_sheet(tmp_path, f"{form}w", [f"{form} third"])
    data = read_iam(tmp_path)
    assert len(data) == 150
    assert set(data.split_N.tolist()) == {0, 1, 2}
    assert [PARTS[number] for number in data.split_N] == [part_of(data[index].target[:7]) for index in range(150)]


def test_forms_stay_whole_when_a_part_is_empty(tmp_path):
    forms = [form for form in (f"a01-{number:03}" for number in range(40)) if part_of(form) != "test"]
    for form in forms:
        put_sheet(tmp_path, f"{form}u", [form, form])
    data = read_iam(tmp_path)
    assert [PARTS[number] for number in data.split_N] == [part_of(data[index].target) for index in range(len(data))]
    assert set(data.split_N.tolist()) == {0, 1}
    assert len(data.notes) == 1


def test_other_files_are_no_lines(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one"])
    put(tmp_path / "original" / "a01" / "a01-000" / "strokesu.xml", "not even XML")
    put(tmp_path / "readme.txt", "about")
    assert len(read_iam(tmp_path)) == 1


def test_empty_strokes_carry_no_ink(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one"])
    put(strokes_path(tmp_path, "a01-000u", 1), session([STROKES[0], [], STROKES[1]]))
    np.testing.assert_array_equal(read_iam(tmp_path)[0].features_TF.numpy(), line_features(STROKES))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is damaged or no plain XML"),
        (session(STROKES)[:-30], "is damaged or no plain XML"),
        (session([]), "has no strokes"),
        (session([[], []]), "has no strokes"),
        ("<html/>", "has the root 'html'"),
        (session(STROKES).replace(' y="300"', ""), "a point without whole numbers x and y"),
        (session(STROKES).replace('"300"', '"3.5"'), "a point without whole numbers x and y"),
        (session(STROKES).replace('"300"', '"high"'), "a point without whole numbers x and y"),
        (session(STROKES).replace('"300"', f'"{"9" * 400}"'), "a point without whole numbers x and y"),
        (session(STROKES).replace("<Whiteboard", '<!DOCTYPE a [<!ENTITY b "c">]><Whiteboard', 1), "never read"),
        (session(STROKES).replace("<Whiteboard", '<!DOCTYPE a SYSTEM "file:///b"><Whiteboard', 1), "never read"),
    ],
)
def test_a_bad_stroke_file_is_named(tmp_path, content, told):
    put_sheet(tmp_path, "a01-000u", ["one", "two"])
    put(strokes_path(tmp_path, "a01-000u", 2), content)
    with pytest.raises(StrettoError, match=rf"a01-000u-02\.xml'.*{told}"):
        read_iam(tmp_path)


def test_a_missing_ascii_file_is_named(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one"])
    put_sheet(tmp_path, "z01-000z", ["two", "three"])
    ascii_path(tmp_path, "z01-000z").unlink()
    told = r"2 of 3 stroke files have no transcript \(no z01-000z\.txt\): z01-000z-01\.xml, z01-000z-02\.xml.*Unpack"
    with pytest.raises(StrettoError, match=told):
        read_iam(tmp_path)


def test_too_few_transcript_lines_are_told(tmp_path):
    put_sheet(tmp_path, "a08-551z", ["one", "two"])
    put(strokes_path(tmp_path, "a08-551z", 3), session(STROKES))
    told = r"1 of 3 stroke files have no transcript \(a08-551z\.txt has 2 lines under CSR:\): a08-551z-03\.xml.*remove"
    with pytest.raises(StrettoError, match=told):
        read_iam(tmp_path)


def test_line_zero_has_no_transcript(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one", "two"])
    put(strokes_path(tmp_path, "a01-000u", 0), session(STROKES))
    with pytest.raises(StrettoError, match=r"a01-000u-00\.xml"):
        read_iam(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"), [(b"OCR:\none\n", "has no line `CSR:`"), (b"CSR:\n\xff\xfe", "could not read")]
)
def test_a_bad_ascii_file_is_named(tmp_path, content, told):
    put_sheet(tmp_path, "a01-000u", ["one"])
    ascii_path(tmp_path, "a01-000u").write_bytes(content)
    with pytest.raises(StrettoError, match=rf"a01-000u\.txt'.*{told}|{told} '.*a01-000u\.txt'"):
        read_iam(tmp_path)


def test_two_transcripts_of_one_sheet_are_refused(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one"])
    put(tmp_path / "copy" / "a01-000u.txt", "CSR:\nanother\n")
    with pytest.raises(StrettoError, match="2 transcripts of 'a01-000u'"):
        read_iam(tmp_path)


def test_a_folder_without_lines_is_told(tmp_path):
    put(tmp_path / "strokesu.xml", "<a/>")
    with pytest.raises(StrettoError, match=r"no stroke file such as a01-000u-01\.xml below"):
        read_iam(tmp_path)
