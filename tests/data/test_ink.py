"""Pen movement: features of strokes, InkML files and IAM-OnDB."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.data import PARTS, NoTargets, line_features, part_of, pen_features, read_iam, read_inkml
from stretto.data.readers.ink import POINTS_PER_HEIGHT
from stretto.errors import StrettoError

WHOLE = st.integers(-500, 500)
ANY_STROKES = st.lists(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.just(2)), elements=WHOLE), min_size=1, max_size=4
)


def test_without_pen_flags_each_sequence_is_one_stroke_in_units_of_its_height():
    xy = np.array([[0, 0], [2, 4], [2, 0], [50, 7], [51, 9]])
    features = pen_features(xy, pen_down_S=None, offsets=np.array([0, 3, 5]), source="here")
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, [[0, 0, 0], [0.5, 1, 0], [0, -1, 1], [0, 0, 0], [0.5, 1, 1]])


def test_pen_features_of_a_flat_sequence_stay_finite():
    features = pen_features(np.array([[0, 3], [9, 3]]), pen_down_S=None, offsets=np.array([0, 2]), source="here")
    assert np.isfinite(features).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_position_of_nan_or_infinity_names_its_sequence(wrong, axis):
    xy = np.zeros((5, 2))
    xy[3, axis] = wrong
    with pytest.raises(StrettoError, match="here: sequence 1 has a NaN or infinite position at its point 1"):
        pen_features(xy, pen_down_S=None, offsets=np.array([0, 2, 5]), source="here")


def test_a_straight_stroke_is_cut_into_even_steps():
    features = line_features([np.array([[10.0, 30.0], [10.0, 20.0]])])
    count = round(POINTS_PER_HEIGHT) + 1
    assert features.shape == (count, 3)
    np.testing.assert_allclose(features[0], [0, 0, 0])
    np.testing.assert_allclose(features[1:, 0], 0, atol=1e-6)
    np.testing.assert_allclose(features[1:, 1], 1 / (count - 1), rtol=1e-5)
    assert features[:, 2].tolist() == [0] * (count - 1) + [1]


def test_a_dot_is_one_step():
    np.testing.assert_array_equal(line_features([np.array([[7.0, 900.0]])]), [[0, 0, 1]])


@settings(deadline=None, max_examples=60)
@given(ANY_STROKES)
def test_the_pen_ends_where_the_strokes_end(strokes):
    features = line_features(strokes)
    unit = float(np.quantile([np.ptp(stroke[:, 1]) for stroke in strokes], 0.75))
    unit = unit or float(np.ptp(np.concatenate(strokes), axis=0).max()) or 1.0
    moved = strokes[-1][-1] - strokes[0][0]
    np.testing.assert_allclose(features[:, :2].sum(axis=0), moved / unit * [1, -1], atol=1e-3, rtol=1e-4)
    assert features[:, 2].sum() == len(strokes)
    assert features[-1, 2] == 1


@settings(deadline=None, max_examples=60)
@given(ANY_STROKES, hnp.arrays(np.float64, 2, elements=WHOLE), st.sampled_from([0.25, 2.0, 64.0]))
def test_place_and_size_of_the_page_do_not_matter(strokes, shift, scale):
    here = line_features(strokes)
    there = line_features([(stroke + shift) * scale for stroke in strokes])
    assert here.shape == there.shape
    np.testing.assert_allclose(here, there, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("far", [1e9, 1e300, 1.7e308])
def test_coordinates_out_of_all_measure_are_refused(far):
    with pytest.raises(StrettoError, match=r"page 3: the pen travels .* over 1000000 steps"):
        line_features([np.array([[-far, 0.0], [far, 1.0]])], source="page 3")


INKML_STROKES = [np.array([[10.0, 40.0], [12.5, 20.0], [14.0, 40.0]]), np.array([[11.0, 30.0], [13.0, 30.0]])]
TRACES = "<trace>10 40, 12.5 20, 14 40</trace><trace>11 30,13 30</trace>"
LAUGHS = '<!DOCTYPE ink [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write(path, inside, *, before=""):
    return put(path, f'{before}<ink xmlns="http://www.w3.org/2003/InkML">{inside}</ink>')


@pytest.mark.parametrize(
    "namespace", ["", 'xmlns="http://www.w3.org/2003/InkML"', 'xmlns:i="http://www.w3.org/2003/InkML"']
)
def test_one_file_is_one_sequence(tmp_path, namespace):
    path, prefix = tmp_path / "word.inkml", "i:" if ":i=" in namespace else ""
    plain = f'<ink {namespace}><annotation type="truth"> Añ </annotation>{TRACES}</ink>'
    path.write_text(re.sub("<(/?)", rf"<\g<1>{prefix}", plain), encoding="utf-8")
    data = read_inkml(path)
    assert len(data) == 1
    assert data.name == "word"
    assert data[0].target == "Añ"
    np.testing.assert_array_equal(data[0].features_TF.numpy(), line_features(INKML_STROKES))
    assert "split by file name" in data.notes[0]


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
    np.testing.assert_array_equal(data[0].features_TF.numpy(), line_features(INKML_STROKES))


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
def test_the_transcript_is_the_first_annotation_of_a_known_type(tmp_path, inside, text):
    assert read_inkml(write(tmp_path / "word.inkml", inside + TRACES))[0].target == text


@pytest.mark.parametrize("parts", [{"train", "valid", "test"}, {"train", "valid"}])
def test_a_folder_is_split_by_file_name(tmp_path, parts):
    names = [name for name in (f"w{number:03}" for number in range(60)) if part_of(name) in parts]
    for number, name in enumerate(names):
        write(tmp_path / f"{number % 3}" / f"{name}.inkml", f'<annotation type="truth">{name}</annotation>{TRACES}')
    data = read_inkml(tmp_path)
    texts = [data[index].target for index in range(len(data))]
    assert sorted(texts) == names
    found = [PARTS[number] for number in data.split_N]
    assert found == [part_of(text) for text in texts]
    assert set(found) == parts
    assert (data.name, len(data.notes)) == (tmp_path.name, 1)


def test_transcripts_are_for_all_files_or_none(tmp_path):
    write(tmp_path / "b.inkml", TRACES)
    assert isinstance(read_inkml(tmp_path).targets, NoTargets)
    write(tmp_path / "a.inkml", f'<annotation type="truth">a</annotation>{TRACES}')
    with pytest.raises(StrettoError, match=r"b\.inkml' has no transcript"):
        read_inkml(tmp_path)


@pytest.mark.parametrize(
    ("inside", "message"),
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
        *(
            (f"<trace>{points}</trace>", "has a trace in a compressed form.*plain decimals")
            for points in ("1125 18432,'23 '43,\"7 \"-8,3 -5", "10 20,'3 4", '10 20,"3 4', "!10 !20", "10 20, 5 '6")
        ),
        *(
            (f"<trace>{points}</trace>", "has the point .* not a plain decimal")
            for points in ("10 20, 30", "10 20,", "10 a", "10 nan, 1 1", "1_0 20", "#A0 #FF", "10-5", "* ?", "٣ 4")
        ),
    ],
)
def test_ink_that_cannot_be_used_names_its_file(tmp_path, inside, message):
    write(tmp_path / "good.inkml", TRACES)
    write(tmp_path / "word.inkml", inside)
    with pytest.raises(StrettoError, match=rf"word\.inkml.*{message}"):
        read_inkml(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (content, "is damaged or not plain XML")
            for content in (b"", b"<ink>", b"<ink><trace>1 2</ink>", b"\x00\x01", b"<ink>\xff</ink>")
        ),
        *(
            (f'<?xml version="1.0" encoding="{name}"?><ink/>'.encode(), "is damaged or not plain XML")
            for name in ("klingon", "utf-32", "shift_jis")
        ),
        (b"<html/>", "has the root 'html'"),
    ],
)
def test_malformed_xml_and_other_roots_are_refused(tmp_path, content, message):
    (tmp_path / "word.inkml").write_bytes(content)
    with pytest.raises(StrettoError, match=rf"word\.inkml' {message}"):
        read_inkml(tmp_path)


@pytest.mark.parametrize(
    ("doctype", "text"),
    [
        (LAUGHS, "&c;"),
        ('<!DOCTYPE ink [<!ENTITY secret SYSTEM "{}">]>', "&secret;"),
        ('<!DOCTYPE ink [<!ENTITY % all SYSTEM "{}"> %all;]>', "plain"),
        ('<!DOCTYPE ink SYSTEM "{}">', "plain"),
    ],
)
def test_entities_are_refused(tmp_path, doctype, text):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret", encoding="utf-8")
    inside = f'<annotation type="truth">{text}</annotation>{TRACES}'
    path = write(tmp_path / "word.inkml", inside, before=doctype.replace("{}", secret.as_uri()))
    with pytest.raises(StrettoError, match="entities are never read") as caught:
        read_inkml(path)
    assert "the secret" not in str(caught.value)


def test_a_folder_without_ink_is_an_error(tmp_path):
    with pytest.raises(StrettoError, match=r"there is no \.inkml file below"):
        read_inkml(tmp_path)


IAM_STROKES = [np.array([[100.0, 400.0], [120.0, 300.0], [140.0, 410.0]]), np.array([[150.0, 350.0]])]


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


def strokes_path(folder, sheet, number):
    form = sheet.rstrip("uwxyz")
    return folder / "lineStrokes" / form[:3] / form / f"{sheet}-{number:02}.xml"


def ascii_path(folder, sheet):
    form = sheet.rstrip("uwxyz")
    return folder / "ascii" / form[:3] / form / f"{sheet}.txt"


def put_sheet(folder, sheet, texts):
    for number in range(1, len(texts) + 1):
        put(strokes_path(folder, sheet, number), session([stroke + number for stroke in IAM_STROKES]))
    lines = "\n\n".join(texts) if len(texts) > 2 else "\n".join(texts)
    put(ascii_path(folder, sheet), f"OCR:\n\nother words\nof the page\n\nCSR:\n\n{lines}\n")


def test_lines_have_ink_and_the_text_under_csr(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["A move to", "stop, Mr.", "Gaitskell"])
    put_sheet(tmp_path, "a01-020", ["of peers"])
    strokes_path(tmp_path, "a01-000u", 2).unlink()
    data = read_iam(tmp_path)
    assert [data[index].target for index in range(3)] == ["A move to", "Gaitskell", "of peers"]
    np.testing.assert_allclose(data[0].features_TF.numpy(), line_features(IAM_STROKES), atol=1e-5)
    assert data.name == tmp_path.name
    assert "no form is in two parts" in data.notes[0]


@pytest.mark.parametrize("parts", [{"train", "valid", "test"}, {"train", "valid"}])
def test_no_form_is_in_two_parts(tmp_path, parts):
    forms = [f"a{number // 10:02}-{number:03}" for number in range(50)]
    for form in forms:
        if part_of(form) in parts:
            put_sheet(tmp_path, f"{form}u", [f"{form} first", f"{form} second"])
            put_sheet(tmp_path, f"{form}w", [f"{form} third"])
    data = read_iam(tmp_path)
    found = [PARTS[number] for number in data.split_N]
    assert found == [part_of(data[index].target[:7]) for index in range(len(data))]
    assert set(found) == parts
    assert len(data.notes) == 1


def test_other_files_are_no_lines_and_empty_strokes_no_ink(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one"])
    put(tmp_path / "original" / "a01" / "a01-000" / "strokesu.xml", "not even XML")
    put(tmp_path / "readme.txt", "about")
    put(strokes_path(tmp_path, "a01-000u", 1), session([IAM_STROKES[0], [], IAM_STROKES[1]]))
    data = read_iam(tmp_path)
    assert len(data) == 1
    np.testing.assert_array_equal(data[0].features_TF.numpy(), line_features(IAM_STROKES))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (session(IAM_STROKES)[:-30], "is damaged or not plain XML"),
        (session([]), "has no strokes"),
        (session([[], []]), "has no strokes"),
        ("<html/>", "has the root 'html'"),
        (session(IAM_STROKES).replace(' y="300"', ""), "a point without integers x and y"),
        (session(IAM_STROKES).replace('"300"', '"3.5"'), "a point without integers x and y"),
        (session(IAM_STROKES).replace('"300"', '"high"'), "a point without integers x and y"),
        (session(IAM_STROKES).replace('"300"', f'"{"9" * 400}"'), "a point without integers x and y"),
        (session(IAM_STROKES).replace("<Whiteboard", '<!DOCTYPE a SYSTEM "file:///b"><Whiteboard', 1), "never read"),
    ],
)
def test_a_bad_stroke_file_is_named(tmp_path, content, message):
    put_sheet(tmp_path, "a01-000u", ["one", "two"])
    put(strokes_path(tmp_path, "a01-000u", 2), content)
    with pytest.raises(StrettoError, match=rf"a01-000u-02\.xml'.*{message}"):
        read_iam(tmp_path)


@pytest.mark.parametrize("number", [0, 3])
def test_a_stroke_file_without_a_line_of_text_is_named(tmp_path, number):
    put_sheet(tmp_path, "a08-551z", ["one", "two"])
    put(strokes_path(tmp_path, "a08-551z", number), session(IAM_STROKES))
    message = rf"1 of 3 stroke files.*\(a08-551z\.txt has 2 lines under CSR:\): a08-551z-0{number}\.xml.*remove"
    with pytest.raises(StrettoError, match=message):
        read_iam(tmp_path)


def test_a_missing_ascii_file_is_named(tmp_path):
    put_sheet(tmp_path, "a01-000u", ["one"])
    put_sheet(tmp_path, "z01-000z", ["two", "three"])
    ascii_path(tmp_path, "z01-000z").unlink()
    message = r"2 of 3 stroke files have no transcript \(no z01-000z\.txt\): z01-000z-01\.xml, z01-000z-02\.xml.*Unpack"
    with pytest.raises(StrettoError, match=message):
        read_iam(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"OCR:\none\n", "has no line `CSR:`"), (b"CSR:\n\xff\xfe", "is not UTF-8")]
)
def test_a_bad_ascii_file_is_named(tmp_path, content, message):
    put_sheet(tmp_path, "a01-000u", ["one"])
    ascii_path(tmp_path, "a01-000u").write_bytes(content)
    with pytest.raises(StrettoError, match=rf"a01-000u\.txt' {message}"):
        read_iam(tmp_path)


def test_two_transcripts_of_one_sheet_and_a_folder_without_lines_are_refused(tmp_path):
    put(tmp_path / "strokesu.xml", "<a/>")
    with pytest.raises(StrettoError, match=r"no stroke file such as a01-000u-01\.xml below"):
        read_iam(tmp_path)
    put_sheet(tmp_path, "a01-000u", ["one"])
    put(tmp_path / "copy" / "a01-000u.txt", "CSR:\nanother\n")
    with pytest.raises(StrettoError, match="2 transcripts of 'a01-000u'"):
        read_iam(tmp_path)


def test_a_number_of_a_million_digits_is_refused_at_once(tmp_path):
    path = tmp_path / "long.inkml"
    path.write_text(f"<ink><trace>{'1' * 1_000_000}x 2</trace></ink>", encoding="utf-8")
    with pytest.raises(StrettoError, match="value 1 is not a plain decimal"):
        read_inkml(path)
