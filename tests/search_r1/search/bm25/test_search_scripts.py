"""BM25 in many scripts: a word of a sentence finds it, marks tell words apart, and English scores stay as they are."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from search_corpora import corpus_of

from search_r1.search.bm25.analyzer import terms, terms_and_length
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.retriever import Hit

SENTENCES = {  # a sentence in a script, and words as they stand in it
    "Latin": ("L’élève étudie à l’université de Besançon près du fleuve.", ["Besançon", "fleuve", "L'élève"]),
    "Vietnamese": ("Hà Nội là thủ đô của nước Việt Nam.", ["thủ đô", "Việt"]),
    "Cyrillic": ("Юрий Гагарин — первый человек, который полетел в космос.", ["Гагарин", "Юрий", "первый"]),
    "Greek": ("Η Αθήνα είναι η πρωτεύουσα της Ελλάδας.", ["Αθήνα", "ΠΡΩΤΕΎΟΥΣΑ"]),
    "Arabic": ("القاهرة هي عاصمة جمهورية مصر العربية.", ["القاهرة", "عاصمة"]),
    "Persian": ("تهران پایتخت ایران است و مردم آن را می‌شناسند.", ["پایتخت", "می‌شناسند", "میشناسند"]),
    "Hebrew": ("ירושלים היא עיר הבירה של מדינת ישראל.", ["ירושלים", "הבירה"]),
    "Hebrew with points": ("בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם", ["בְּרֵאשִׁית", "הַשָּׁמַיִם"]),
    "Syriac": ("ܐܘܪܗܝ ܗܝ ܡܕܝܢܬܐ ܥܬܝܩܬܐ", ["ܡܕܝܢܬܐ"]),
    "Thaana": ("މާލެ އަކީ ދިވެހިރާއްޖޭގެ ވެރިރަށެވެ.", ["މާލެ", "ވެރިރަށެވެ"]),
    "Devanagari": ("नई दिल्ली भारत की राजधानी है।", ["दिल्ली", "राजधानी"]),
    "Bengali": ("ঢাকা বাংলাদেশের রাজধানী ও বৃহত্তম শহর।", ["ঢাকা", "রাজধানী"]),
    "Tamil": ("சென்னை தமிழ்நாட்டின் தலைநகரம் ஆகும்.", ["சென்னை", "தலைநகரம்"]),
    "Telugu": ("హైదరాబాదు తెలంగాణ రాజధాని నగరం.", ["తెలంగాణ", "రాజధాని"]),
    "Kannada": ("ಬೆಂಗಳೂರು ಕರ್ನಾಟಕದ ರಾಜಧಾನಿ.", ["ಬೆಂಗಳೂರು", "ರಾಜಧಾನಿ"]),
    "Malayalam": ("തിരുവനന്തപുരം കേരളത്തിന്റെ തലസ്ഥാനമാണ്.", ["തിരുവനന്തപുരം", "തലസ്ഥാനമാണ്"]),
    "Gujarati": ("ગાંધીનગર ગુજરાતનું પાટનગર છે.", ["ગાંધીનગર", "પાટનગર"]),
    "Gurmukhi": ("ਅੰਮ੍ਰਿਤਸਰ ਪੰਜਾਬ ਦਾ ਇੱਕ ਸ਼ਹਿਰ ਹੈ।", ["ਅੰਮ੍ਰਿਤਸਰ", "ਸ਼ਹਿਰ"]),
    "Odia": ("ଭୁବନେଶ୍ୱର ଓଡ଼ିଶାର ରାଜଧାନୀ ଅଟେ।", ["ଭୁବନେଶ୍ୱର", "ରାଜଧାନୀ"]),
    "Sinhala": ("කොළඹ ශ්‍රී ලංකාවේ විශාලතම නගරයයි.", ["ශ්‍රී", "කොළඹ"]),
    "Thai": ("กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย", ["เมืองหลวง", "ประเทศไทย", "เมือง", "ไทย"]),
    "Lao": ("ວຽງຈັນເປັນນະຄອນຫຼວງຂອງປະເທດລາວ", ["ນະຄອນຫຼວງ", "ລາວ"]),
    "Khmer": ("ភ្នំពេញជារាជធានីនៃព្រះរាជាណាចក្រកម្ពុជា", ["ភ្នំពេញ", "រាជធានី", "កម្ពុជា"]),
    "Burmese": ("နေပြည်တော်သည်မြန်မာနိုင်ငံ၏မြို့တော်ဖြစ်သည်", ["မြန်မာ", "မြို့တော်"]),
    "Javanese": ("ꦪꦺꦴꦒꦾꦏꦂꦠꦲꦶꦁꦏꦁꦏꦸꦛ", ["ꦏꦸꦛ"]),
    "Tibetan": ("ལྷ་ས་ནི་བོད་ཀྱི་རྒྱལ་ས་ཡིན།", ["ལྷ་ས", "རྒྱལ་ས"]),
    "Georgian": ("თბილისი საქართველოს დედაქალაქია.", ["თბილისი", "საქართველოს"]),
    "Armenian": ("Երևանը Հայաստանի մայրաքաղաքն է։", ["Հայաստանի", "մայրաքաղաքն"]),
    "Ethiopic": ("አዲስ፡አበባ፡የኢትዮጵያ፡ዋና፡ከተማ፡ናት።", ["አበባ", "ከተማ"]),
    "Cherokee": ("ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ᎠᏂᏬᏂᏍᎬᎢ", ["ᎦᏬᏂᎯᏍᏗ"]),
    "Mongolian": ("ᠮᠣᠩᠭᠣᠯ ᠤᠯᠤᠰ ᠤᠨ ᠨᠡᠢᠰᠯᠡᠯ", ["ᠨᠡᠢᠰᠯᠡᠯ"]),
    "Han": ("东京是日本的首都，也是世界上人口最多的城市。", ["首都", "城市", "日"]),
    "Japanese": ("東京タワーは日本の首都にあるとても高いたてものです。", ["東京", "タワー", "首都", "たてもの"]),
    "half-width Katakana": ("この駅にはｴﾚﾍﾞｰﾀｰがあります", ["エレベーター"]),
    "Hangul": ("서울특별시는 대한민국의 수도이자 최대 도시이다.", ["서울", "대한민국", "수도"]),
    "Bopomofo": ("注音ㄅㄆㄇㄈ符號", ["ㄆㄇ", "符號"]),
    "Chakma": ("𑄌𑄋𑄴𑄟𑄳𑄦 𑄞𑄌𑄴", ["𑄌𑄋𑄴𑄟𑄳𑄦"]),
    "Han beyond U+FFFF": ("他姓𠮷野，住在大阪。", ["𠮷野", "大阪"]),
}
DIFFERENT = {  # words that differ in one sign
    "a vowel sign of Hindi": ("कल", "काल"),
    "a virama": ("कमला", "कम्ला"),
    "the nasal of Hindi": ("है", "हैं"),
    "a vowel sign of Bengali": ("মন", "মিন"),
    "a virama of Tamil": ("கல", "கல்"),
    "a tone of Thai": ("มา", "ม้า"),
    "a vowel of Thai": ("กิน", "กึน"),
    "a vowel of Khmer": ("កា", "កុ"),
    "a tone of Burmese": ("မ", "မး"),
    "a vowel sign of Tibetan": ("བད", "བོད"),
    "a voiced kana": ("かき", "かぎ"),
    "a voiced kana, decomposed": ("はは", "は\u3099は"),
    "a half-voiced kana": ("ハン", "パン"),
    "a vowel of Arabic": ("كَتب", "كُتب"),
    "a point of Hebrew": ("שׁם", "שׂם"),
    "short i": ("мой", "мои"),
    "yi of Ukrainian": ("їх", "іх"),
}


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Bm25Retriever:
    texts = [text for text, _ in SENTENCES.values()]
    return Bm25Retriever.build(corpus_of(tmp_path_factory.mktemp("scripts"), *texts))


@pytest.mark.parametrize("script", SENTENCES)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_word_of_a_sentence_finds_it(script: str, form: str, retriever: Bm25Retriever) -> None:
    row = list(SENTENCES).index(script)
    text, words = SENTENCES[script]
    for word in words:
        (hits,) = retriever.search([unicodedata.normalize(form, word)], len(SENTENCES))
        assert row in [hit.row for hit in hits], (script, word, terms(word))
    assert set(terms(words[0])) <= set(terms(text))


@pytest.mark.parametrize("sign", DIFFERENT)
def test_words_that_differ_in_a_sign_have_different_terms(sign: str) -> None:
    one, other = DIFFERENT[sign]
    assert terms(one) and terms(other) and terms(one) != terms(other)
    assert not set(terms(f"{one} {one}")) ^ set(terms(unicodedata.normalize("NFD", one)))


def test_what_the_terms_of_a_script_are() -> None:
    assert terms("東京は日本の首都") == ["東", "京", "は", "日", "本", "の", "首", "都"]
    assert terms("タワー") == ["タワ", "ワー"]
    assert terms("2020年のiPhone's発売") == ["2020", "年", "の", "iphon", "発", "売"]
    assert terms("서울에 가다") == ["서울", "울에", "가다"]
    assert terms("葛\U000e0100城_x") == terms("葛城 x")  # a selector of one of its glyphs
    assert terms("Пётр Ильи́ч Чайковский") == ["петр", "ильич", "чайковский"]  # stress, and io as most people write it
    assert terms("دانش\u200cآموز") == terms("دانشآموز")
    assert terms("1\ufe0f\u20e3 x\u20d7y e\u0331 co\u00adop") == ["1", "x", "y", "e", "co", "op"]
    assert terms("\u0301 \u093e ' _") == []


def test_the_length_of_a_passage_is_in_words() -> None:
    for english in ("The cats' U.S. river", "Beyoncé – “naïve” café", "Ελλάδα и Россия"):
        assert terms_and_length(english) == (terms(english), len(terms(english)))
    assert terms_and_length("The capital, 東京, is old") == (["capit", "東", "京", "old"], 3)
    assert terms_and_length("東京タワー、日本") == (["東", "京", "タワ", "ワー", "日", "本"], 2)
    assert terms_and_length("ประเทศไทย") == (["ปร", "ระ", "ะเ", "เท", "ทศ", "ศไ", "ไท", "ทย"], 1)
    assert terms_and_length("दिल्ली") == (["दिल्ली"], 3)  # pieces between marks


def test_names_in_other_scripts_leave_english_scores_as_they_are(tmp_path: Path) -> None:
    """One run of characters counts as one word, as a word of Latin letters in its place would."""
    english = ["Tokyo is the capital of Japan", "Bangkok is a city", "the river of a city in Japan"]
    queries = ["capital city of Japan", "Tokyo river", "Bangkok"]

    def found(*names: str) -> list[list[Hit]]:
        texts = [f"{text} {name}" for text, name in zip(english, names, strict=True)]
        return Bm25Retriever.build(corpus_of(tmp_path, *texts)).search(queries, 3)

    assert found("東京", "ประเทศไทย", "かわのながれ") == found("zyx", "wvu", "tsr")
