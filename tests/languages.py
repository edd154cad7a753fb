"""Article 1 of the Universal Declaration of Human Rights in ten languages, and other text that is hard to divide."""

DECLARATION = {
    "english": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "german": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geiste der Brüderlichkeit begegnen.",
    "russian": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью "
    "и должны поступать в отношении друг друга в духе братства.",
    "greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. Είναι προικισμένοι με "
    "λογική και συνείδηση, και οφείλουν να συμπεριφέρονται μεταξύ τους με πνεύμα αδελφοσύνης.",
    "chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"
    "人間は、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。",
    "thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ "
    "ต่างมีเหตุผลและมโนธรรม และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। "
    "उन्हें बुद्धि और अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए।",
    "arabic": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق. "
    "وقد وهبوا عقلاً وضميراً وعليهم أن يعامل بعضهم بعضاً بروح الإخاء.",
    "korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. "
    "인간은 천부적으로 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다.",
}
OTHER = [
    "def f(x: int) -> str:\n\treturn f'{x:>8}' if x != 0 else \"\"\n\n\n    # done\r\n\r\nfor (;;) { i++; }",
    "1 22 333 4444 55555 3.14159 1,000,000 ٣٤٥ १२३ Ⅷ ½ x2 2x 10^6 0xFF",
    "🙂 🎉🎉 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️ → ∑ ≠ ™ €5",
    "I'm you're he's we'll they've I'd don't 'S 'RE IT'S O'Neil 'tis ’s ''s",
    "  two   three    four \n\n\n lines\t\ttabs \n  \r\n \u00a0\u3000\u2028end   ",
    "spelled <|endoftext|> out <s></s> [PAD1] <unk>",
    "nai\u0308ve e\u0301 \u200b\ufeff\u00ad \u0000 \u001c \U0001f9ff \ue000 ſ K",
    "",
    " ",
    "\n",
]
TEXTS = [*DECLARATION.values(), *OTHER, "\n\n".join(DECLARATION.values())]
