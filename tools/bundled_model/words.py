"""Lists common English words, and makes words up.

`random_word` returns a lower-case word of a to z. Made-up words are there so that spelling,
reversing and counting are learnt as operations on characters, not as a table of known words.
"""

import random
from collections.abc import Callable

MIN_LETTERS = 2
MAX_LETTERS = 12


def listed(block: str, separator: str | None = None) -> tuple[str, ...]:
    """Returns the items of a text block: words, or whatever stands between separators."""
    return tuple(item.strip() for item in block.split(separator))


COMMON_WORDS = listed(
    """
    able about above accept account across action active actor address adult advice afraid after again
    against agree airport alarm album alive allow almost alone along already always amazing amount anchor
    ancient angel anger angle animal ankle answer anyone apart apple april apron area argue arm army around
    arrive arrow art artist ask asleep atom attack aunt author autumn avocado awake award away baby back bacon
    badge bag bake baker balance ball balloon bamboo banana band bank bar bark barn base basket bat bath
    battle beach beak bean bear beard beast beauty become bed bee before begin behave behind bell belong below
    belt bench bend berry beside best better between beyond bicycle big bike bird birthday biscuit bite bitter
    black blade blanket block blood blossom blue board boat body boil bold bone book boot border bored borrow
    bottle bottom bowl box boy brain branch brave bread break breakfast breath brick bridge bright bring broom
    brother brown brush bubble bucket build building bulb bunny burn bus bush busy butter butterfly button buy
    cabbage cabin cable cake calendar calf call calm camel camera camp candle candy cap captain car card care
    careful carpet carrot carry castle cat catch cave celery cell center century cereal chain chair chairlift
    chalk chance change chapter cheap cheek cheese cherry chess chest chicken child chimney chin chocolate
    choose church circle circus city clap class classroom clean clear clever cliff climb clock close cloth
    cloud clown coach coal coast coat cobra coconut coffee coin cold collar color comb come comfort common
    company compass computer concert cook cookie cool copper copy coral corn corner correct cotton couch count
    country courage cousin cover cow crab cradle crane crayon cream create credit creek cricket crocodile crow
    crowd crown cruel cry crystal cucumber cup curious current curtain curve cushion custom cute cycle daisy
    damp dance danger dark daughter dawn day deal dear decide deep deer degree delight depend desert desk
    dessert detail diamond diary difference different difficult dig dinner dinosaur direction dirty discover
    dish distance dive doctor dog doll dollar dolphin donkey door double dragon drain draw drawer dream dress
    drink drive drop drum dry duck dust each eager eagle early earn earth east easy eat echo edge effort egg
    eight elbow eleven elephant empty energy engine enjoy enough enter equal escape evening event every exact
    example excite exercise expert explain explore eye fabric face fact factory fair fairy fall family famous
    fancy far farm farmer fast father favor fear feather feed feel fence fern ferry festival fever few field
    fight figure fill film final find finger finish fire firm first fish fit five flag flame flash flat flavor
    float flock flood floor flour flower flute fly fog fold follow food foot forest forget fork form forward
    fossil fountain four fox frame free freedom freeze fresh friend friendly frog front frost frozen fruit
    full funny fur future galaxy game garage garden garlic gate gather gentle ghost giant gift ginger giraffe
    give glad glass globe glove glue goal goat gold good goose grain grand grape grass gravity great green
    grocery ground group grow guard guess guest guide guitar habit hair half hall hammer hamster hand handle
    happen happy harbor hard harvest hat hawk head health heart heat heavy hedgehog height hello helmet help
    hen here hero hide high hill history hobby hold hole holiday hollow home honest honey hope horn horse
    hospital hotel hour house huge human hundred hungry hunt hurry husband ice icicle idea igloo image
    imagine important inch insect inside invent iron island ivory jacket jaguar jam jar jazz jeans jelly jewel
    job join joke journey joy judge juice juicy jump jungle junior kangaroo keep kettle key keyboard kick kid
    kind king kingdom kiss kitchen kite kitten knee knife knight knock knot know koala label ladder lake lamb
    lamp land language lantern large last late laugh laundry law lazy leader leaf learn leather leave lemon
    lemonade length leopard lesson letter lettuce level library life lift light lily limit line lion lip list
    listen little lizard llama lobster local lock log lonely long look lose lost loud love lovely low lucky
    lunch machine magic magnet mail main make manager mango map marble march market mask match math matter
    meadow meal mean measure meat medal medicine meet melon melt member memory message metal middle midnight
    milk mill million mind minute mirror mist mistake mitten mix model modern moment money monkey month moon
    morning moss mother motor mountain mouse mouth move movie much mud muffin muscle museum mushroom music
    mystery nail name napkin narrow nation nature near neck need needle neighbor nephew nest network never
    news nice night nine noise noodle noon north nose note nothing notice number nurse oak ocean octopus
    office often oil old olive onion open orange orbit orchard order organ ostrich other otter outside oven
    over owl owner oyster package page paint pair palace palm pan pancake panda paper parade parent park
    parrot part party pass past path patient pattern peace peach peacock peanut pear pearl pebble pen pencil
    penguin people pepper perfect person phone photo piano picnic picture pie piece pig pigeon pillow pilot
    pine pink pirate pizza place plan planet plant plate play please plenty plum pocket poem poet point polar
    police polite pond pony pool poor popcorn porch possible postcard pot potato powder power practice present
    pretty price prince princess print prize problem promise proud pudding puddle pull pumpkin puppet puppy
    purple purse push puzzle python quack quality quarter queen question quick quiet quilt rabbit race radio
    railway rain rainbow raise raven reach read ready real reason record red remember repeat reply rescue rest
    return rhythm ribbon rice rich riddle ride right ring rise river road roast robin robot rock rocket roof
    room root rope rose rough round route royal rubber rug ruler run sad saddle safe sail sailor salad salmon
    salt same sand sandwich sauce sausage save scale scarf school science scissors score season seat second
    secret seed send sense sentence seven shade shadow shape share shark sharp sheep shelf shell shine ship
    shirt shoe shop short shoulder shout shovel show shower shrimp sick side sign silent silk silver simple
    sing sister six size skate ski skill skin skirt sky sleep sleeve slice slide slow small smart smell smile
    smoke smooth snail snake snow snowman soap soccer sock sofa soft soil soldier solid song sorry sound soup
    sour south space spare spark speak special speed spell spider spin spirit spoon sport spring square
    squirrel stable stage stair stamp star start station statue steam steel stem step stick stone stop store
    storm story stove straight strange straw strawberry stream street string strong student study sudden sugar
    suit summer sun sunday sunflower sunny supper sure surprise swan sweater sweet swim swing sword syrup
    system table tail tailor talent talk tall tank tape taste taxi tea teach teacher team tear teeth telephone
    temple ten tennis tent test thank theater thick thief thing think third thirsty thousand thread three
    throat throne throw thumb thunder ticket tide tie tiger tight time tiny tired toast today toe together
    tomato tomorrow tongue tool tooth top tortoise touch tour towel tower town toy track tractor trade train
    travel treasure tree triangle trick trip trophy trouble truck trumpet trust truth try tulip tunnel turkey
    turn turtle twelve twenty twin umbrella uncle under understand uniform unit universe useful valley value
    van vase vegetable velvet very view village vine violet violin visit voice volcano vote voyage wagon wait
    walk wall walnut walrus want warm wash watch water wave wax weak wealth weather wedding week weight west
    whale wheat wheel whisper whistle white whole wide wife wild wind window wing winner winter wise wish wolf
    woman wonder wood wool word work world worm worry wrist write wrong yard year yellow yesterday yogurt
    young zebra zero zigzag zoo
    """
)

_ONSETS = listed("b c d f g h j k l m n p r s t v w y z bl br ch cl cr dr fl gr pl pr sh sl st th tr")
_VOWELS = listed("a e i o u a e i o u ai ee oo ea ou")
_CODAS = ("", "", "", "n", "r", "s", "t", "l", "m", "ck", "ll", "ss", "nt", "rd")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made_up_word(rng: random.Random) -> str:
    """Draws a pronounceable word that is most likely not English."""
    length = rng.randint(3, MAX_LETTERS)
    word = ""
    while len(word) < length:
        word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    return word[:length]


def letter_string(rng: random.Random) -> str:
    """Draws random letters, drawn from a few distinct ones so that repeats such as those of banana are common."""
    distinct = rng.sample(_LETTERS, rng.randint(2, 8))
    return "".join(rng.choice(distinct) for _ in range(rng.randint(MIN_LETTERS, MAX_LETTERS)))


def common_word(rng: random.Random) -> str:
    """Draws a word of the list above."""
    return rng.choice(COMMON_WORDS)


_SOURCES: tuple[Callable[[random.Random], str], ...] = (common_word, made_up_word, letter_string)


def random_word(rng: random.Random) -> str:
    """Draws a word to spell, reverse or count in."""
    source = rng.choices(_SOURCES, weights=(50, 35, 15))[0]
    return source(rng)
