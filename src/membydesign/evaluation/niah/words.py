"""Common English adjectives and nouns that form the keys of needles: `adjective-noun`."""

_ADJECTIVES = """
able absent active afraid agile alert alive amber ample ancient angry annual anxious apt arctic ashen atomic autumn
awake aware awful bald bare basic bent big bitter blank blind blond blue blunt bold boring brave brief bright broad
broken bronze brown busy calm careful casual cheap cheerful chief chilly civil classic clean clear clever close cloudy
coarse cold common cool copper correct cosy crazy crimson crisp crooked cruel cubic curious curly daily damp dark dead
deaf dear decent deep dense digital dim dirty distant divine dizzy double drab dry due dull dusty eager early eastern
easy elegant elder empty entire equal exact exotic extra faint fair false famous fancy far fast fat feeble fierce
final fine firm first flat fluffy foggy fond foolish formal fragile frank free fresh frosty frozen full fuzzy general
gentle giant glad global golden good grand grave gray great greedy green grim gross handy happy hard harsh heavy
helpful hidden high hollow holy honest hot huge humble humid hungry icy ideal idle inner instant ivory jolly joyful
juicy junior keen kind large late lazy lean left legal level light likely linear liquid little lively local lonely
long loose loud lovely low loyal lucky lunar mad magenta major mature mellow mental merry mighty mild minor misty
mobile modern modest moist moral muddy mute narrow nasty native naval near neat nervous new nimble noble noisy normal
northern novel numb oak odd old olive open orange orderly outer oval pale past patient perfect petty pink plain
playful polite poor popular precious pretty prime private proper proud public pure purple quaint quick quiet random
rapid rare raw ready real recent red regal remote rich rigid ripe rough round royal rude rural rusty sad safe salty
sandy scarce scarlet secret senior serious sharp shiny short shy silent silky silly silver simple single slender slim
slow small smart smooth snowy social soft solar solid sore sour southern spare special spicy square stable stale
steady steep sticky stiff still stormy straight strange strict strong sturdy subtle sudden sunny super sweet swift
tall tame tan tart tender tense thick thin thirsty tidy tight tiny tired tough tropical true typical ugly unique upper
urban useful usual vague vain valid vast violet vital vivid warm weak wealthy weary weekly western wet white whole
wicked wide wild wise witty wooden woolly worthy yellow young
"""
_NOUNS = """
acorn actor airport album alley almond amount anchor angle animal ankle answer apple apron arch area arena arm army
arrow artist atlas attic author autumn axis badge bag bakery ball balloon banana band bank banner barn barrel basin
basket bath battery beach bead beam bean bear beaver bed bee bell bench berry bicycle bill bird biscuit blade blanket
block board boat body bolt bone book boot border bottle bowl box branch brass bread brick bridge broom brother brush
bucket building bull bus butter button cabin cable cake camel camera camp canal candle canoe canvas captain car card
carpet carrot cart castle cat cave ceiling cello chain chair chalk chapel chapter cheese cherry chest chicken chimney
church circle city clay cliff clock cloth cloud clover coach coast coat coffee coin collar colony column comb comet
compass copper coral corner cotton couch council country course cousin cow crab cradle crane crater crayon cream creek
cricket crown crystal cup curtain cushion dance daughter day deer desert desk diamond diary dinner doctor dog dollar
dolphin donkey door dragon drawer dream dress drum duck eagle ear earth editor egg elbow elephant engine envelope
evening eye fabric face factory falcon family farm farmer feather fence field figure film finger fire fish flag flame
floor flour flower flute fog food foot forest fork fort fountain fox frame friend frog fruit garden garlic gate ghost
giant ginger giraffe girl glass globe glove goat gold goose grain grape grass guitar hall hammer hand harbor hat hawk
hay head heart hedge helmet hen herb hill hip holiday honey hook horn horse hospital hotel hour house ice idea inch
ink insect iron island ivy jacket jar jewel journey judge juice jungle kettle key king kitchen kite knee knife knight
knot ladder lake lamb lamp land lantern laundry lawyer leaf leather lemon letter library lion lizard lobster lock log
lunch machine magnet maid map maple marble market mask meadow meal melon metal meteor milk mill mine minute mirror
mitten monkey month moon morning moss mountain mouse mouth museum music mustard nail napkin neck needle nest net
newspaper night north nose notebook novel oak ocean office oil olive onion opera orange orbit orchard organ otter oven
owl ox oyster page paint palace palm pan panda paper parade park parrot path pea peach peanut pear pebble pelican pen
pencil pepper piano picture pie pig pigeon pillow pilot pin pine pipe planet plant plate pocket poem poet pond pony
potato prince prize pumpkin puppy purse puzzle queen quilt rabbit radio rail rain ranch raven razor region rhythm
ribbon rice ring river road robin rocket roof room root rope rose rug ruler saddle sail salad salt sand sandwich scarf
school scissors screen seat seed shadow shark sheep shelf shell ship shirt shoe shop shore shoulder silk singer sister
skirt sky sled sleeve slipper snail snake snow soap sock soldier son song soup spade spider spoon spring squirrel
stable stage stair star statue steam stem stone storm story stove straw stream street string student sugar suit summer
sun swan table tailor tea teacher temple tent theater thorn thread throne thumb ticket tiger timber toast tomato tooth
torch tower town toy track train tree trumpet tulip tunnel turkey turtle uncle valley van vase vault vest village vine
violin voice volcano wagon wall walnut water wave wheat wheel whistle willow window wing winter wire wolf wood wool
word worm wrist yard year zebra
"""

ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
